"""Snapshots in each mode that torch records: the line of Python, the steps, and the verdict."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.cuda import _memory_viz

from jettison.cli.main import run
from jettison.diagnose.finding import FindingKind
from jettison.diagnose.memory_facts import grown_bytes
from jettison.diagnose.out_of_memory import diagnose_memory
from jettison.diagnose.snapshot import DeviceSnapshot, facts_of_snapshot, read_snapshot, snapshot_of
from support.recorded_snapshots import (
    BLOCK,
    CALL,
    ENTRY,
    IN_FORWARD,
    IN_STEP,
    LINEAR,
    LOOP,
    MAIN,
    MIB,
    SITE,
    Loop,
    Mode,
    Recorder,
    cpp,
    one_forward,
    one_step,
    py,
)

FORWARD = ("run/model.py:22 forward", "forward")
KEPT = "run/train.py:37 train"
CHECKPOINT = f"{SITE}/torch/utils/checkpoint.py"
EVALUATES = cpp("torch::autograd::Engine::evaluate_function()")

EVENTS_HAVE_STACKS = {
    "stacks=all, context=all": Mode(),
    "stacks=all, context=alloc": Mode(context="alloc"),
    "stacks=python, context=all": Mode(stacks="python"),
    "stacks=python, context=alloc": Mode(stacks="python", context="alloc"),
    "expandable segments": Mode(expandable=True),
    "a private pool": Mode(pool=(0, 1)),
    "a pool of the user's": Mode(pool=(2, 0)),
    "annotations": Mode(annotations=True),
}
NO_STACKS_OF_EVENTS = {
    "stacks=all, context=state": Mode(context="state"),
    "stacks=python, context=state": Mode(stacks="python", context="state"),
    "context=None": Mode(context=None),
    "enabled=state": Mode(enabled="state"),
    "enabled=state, stacks=python": Mode(enabled="state", stacks="python", context="state"),
    "torch 2.0's list": Mode(older=True),
}
ALL = EVENTS_HAVE_STACKS | NO_STACKS_OF_EVENTS


def recorded(mode: Mode, does: Callable[[Recorder], None]) -> Recorder:
    recorder = Recorder(mode)
    does(recorder)
    return recorder


def device_of(recorder: Recorder) -> DeviceSnapshot:
    return snapshot_of(recorder.content(), "x.pickle").busiest


@pytest.mark.parametrize("name", EVENTS_HAVE_STACKS)
def test_the_place_is_the_first_line_of_the_users_code(name: str) -> None:
    device = device_of(recorded(EVENTS_HAVE_STACKS[name], Loop(steps=3).record))
    timeline = device.timeline
    found = timeline.shares(timeline.peak_event, "module", "role")
    assert found[FORWARD][0] >= 8 * MIB
    assert ("run/model.py:9 __init__", "parameters") in found
    assert ("run/train.py:41 train", "optimizer") in found
    backward = {key for key in found if key[1] == "backward" or key == ("", "unknown")}
    python = EVENTS_HAVE_STACKS[name].stacks == "python"
    assert backward == {("", "unknown") if python else ("MmBackward0", "backward")}
    assert not [module for module, _ in found if ".cpp" in module or "::" in module]
    (site,) = {label.site for label in timeline.labels if (label.module, label.role) == FORWARD}
    assert site == "einops/einops.py:916 einsum"


@pytest.mark.parametrize("name", ALL)
def test_bytes_are_the_same_in_each_mode(name: str) -> None:
    recorder = recorded(ALL[name], Loop(steps=4).record)
    device = device_of(recorder)
    assert device.timeline.end_bytes == sum(block.requested for block in recorder.live.values()) == 4 * 12 * MIB
    assert device.reserved_bytes == sum(recorder._sizes.values())
    if ALL[name].enabled == "all" and not ALL[name].older:
        assert device.timeline.peak_bytes == (16 + 32 + 32 + 4) * MIB  # the first backward node of a later step


@pytest.mark.parametrize("name", ["stacks=all, context=state", "enabled=state", "torch 2.0's list"])
def test_what_is_there_at_the_end_has_its_stack_from_its_block(name: str) -> None:
    device = device_of(recorded(ALL[name], Loop(steps=4).record))
    found = device.timeline.shares(len(device.timeline.allocation) - 1, "module", "role")
    assert found == {
        ("run/train.py:41 train", "optimizer"): (32 * MIB, 4),
        ("run/model.py:9 __init__", "parameters"): (16 * MIB, 4),
    }


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", EVENTS_HAVE_STACKS)
def test_steps_end_where_the_optimizer_or_zero_grad_is(name: str, fused: bool) -> None:
    mode = EVENTS_HAVE_STACKS[name]
    facts = facts_of_snapshot(snapshot_of(recorded(mode, Loop(steps=9, fused=fused).record).content(), "x"))
    seen = not fused or mode.context == "all"  # a fused optimizer allocates once; frees of zero_grad need their stack
    assert len(facts.steps) == (9 if seen else 2)
    if seen:
        assert {step.between_bytes for step in facts.steps[1:]} <= {48 * MIB, 64 * MIB}
        assert len({step.between_bytes for step in facts.steps[2:-1]}) == 1


def test_a_leak_in_a_trainer_names_the_librarys_line() -> None:
    """The user's line is that of the whole training."""
    recorder = Recorder(Mode())
    trainer = py("_inner_training_loop", f"{SITE}/transformers/trainer.py", 2578)
    kept = (py("log", f"{SITE}/transformers/trainer.py", 3001), trainer, MAIN)
    for _ in range(10):
        held = [recorder.alloc(8 * MIB, (LINEAR, CALL, trainer, MAIN)) for _ in range(4)]
        recorder.alloc(MIB, kept)
        recorder.free(held, (trainer, MAIN))
        recorder.free([recorder.alloc(MIB, (*IN_STEP[:3], trainer, MAIN))], (*IN_STEP[:3], trainer, MAIN))
    found = diagnose_memory(facts_of_snapshot(snapshot_of(recorder.content(), "x")))
    assert found.kind is FindingKind.LEAK
    assert "run/train.py:60 <module>, made at transformers/trainer.py:3001 log, leaves 1.0 MiB" in found.evidence[1]


@pytest.mark.parametrize("loop", [Loop(steps=9, in_backward=True), Loop(steps=9, lingers=True)])
@pytest.mark.parametrize("name", EVENTS_HAVE_STACKS)
def test_what_an_optimizer_does_elsewhere_ends_no_step(name: str, loop: Loop) -> None:
    """Steps within backward; memory of the optimizer's that is freed in a forward, where a free may have its stack."""
    facts = facts_of_snapshot(snapshot_of(recorded(EVENTS_HAVE_STACKS[name], loop.record).content(), "x"))
    assert len(facts.steps) == 9
    assert diagnose_memory(facts).kind is FindingKind.PEAK


@pytest.mark.parametrize("name", EVENTS_HAVE_STACKS)
def test_a_leak_is_found_in_each_mode_that_has_stacks(name: str) -> None:
    facts = facts_of_snapshot(
        snapshot_of(recorded(EVENTS_HAVE_STACKS[name], Loop(keeps=3 * MIB).record).content(), "x")
    )
    found = diagnose_memory(facts)
    assert found.kind is FindingKind.LEAK
    assert [one.module for one in facts.survivors] == [KEPT]
    assert facts.survivors[0].bytes_per_step == 3 * MIB


HEALTHY: dict[str, Callable[[Recorder], None]] = {
    "a loop": Loop().record,
    "a fused optimizer": Loop(fused=True).record,
    "state that appears late": Loop(late_state=True, steps=14).record,
    "one forward": one_forward,
    "one step": one_step,
}


@pytest.mark.parametrize("does", HEALTHY)
@pytest.mark.parametrize("name", ALL)
def test_no_leak_is_invented(name: str, does: str) -> None:
    facts = facts_of_snapshot(snapshot_of(recorded(ALL[name], HEALTHY[does]).content(), "x"))
    found = diagnose_memory(facts)
    assert found.kind is FindingKind.PEAK and not found.changes
    assert not facts.survivors and grown_bytes(facts) == 0
    if does == "one forward":
        assert facts.steps == ()


def test_without_stacks_a_leak_is_not_told_from_activations() -> None:
    facts = facts_of_snapshot(snapshot_of(recorded(Mode(context=None), Loop(keeps=3 * MIB).record).content(), "x"))
    assert facts.steps == () and diagnose_memory(facts).kind is FindingKind.PEAK


def test_annotations_end_steps_where_stacks_do_not() -> None:
    for context in (None, "state"):
        mode = Mode(context=context, annotations=True)
        facts = facts_of_snapshot(snapshot_of(recorded(mode, Loop(steps=8, fused=True).record).content(), "x"))
        assert len(facts.steps) == 8


def test_the_last_events_alone_have_steps_too() -> None:
    facts = facts_of_snapshot(
        snapshot_of(recorded(Mode(max_entries=200), Loop(steps=40, keeps=3 * MIB).record).content(), "x")
    )
    assert diagnose_memory(facts).kind is FindingKind.LEAK
    assert facts.notes == ("the oldest events are missing: what was allocated before them has no stack",)


@pytest.mark.parametrize("name", ALL)
def test_a_recording_without_stacks_says_how_to_record(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = recorded(ALL[name], Loop(steps=4).record)
    recorder.oom(96 * MIB, 5 * MIB, IN_FORWARD)
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(recorder.content()))
    has_events = ALL[name].enabled == "all" and not ALL[name].older
    for command in (["doctor", "--oom"], ["report", "--out", str(tmp_path / "page.html")]):
        assert run([*command, str(tmp_path / "x.pickle")]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("events have no stacks" in text) == (has_events and name not in EVENTS_HAVE_STACKS), text
        assert ('_record_memory_history(stacks="python")' in text) == ("events have no stacks" in text)
        assert ("there are no events" in text) == (device_of(recorder).timeline.peak_event < 0)
        assert "67108864" not in text
        if has_events and command[0] == "report":
            assert "out of memory 96.00 MiB asked for, 5.00 MiB free" in text


def test_a_budget_is_no_less_than_a_peak_that_went_through() -> None:
    """A request that is larger than any before: a step of 84 MiB fit, though tensors have 48 MiB and 5 are free."""
    recorder = recorded(Mode(), Loop(steps=6).record)
    recorder.oom(96 * MIB, 5 * MIB, IN_FORWARD)
    found = diagnose_memory(facts_of_snapshot(snapshot_of(recorder.content(), "x")))
    assert found.claim.endswith("more than each step before") and "batch" not in found.claim
    assert "jettison plan MODEL --budget 84MiB" in [change.line for change in found.changes]


def test_growth_that_is_less_than_what_is_missing_gets_its_advice_too() -> None:
    recorder = recorded(Mode(), Loop(steps=10, keeps=3 * MIB).record)
    recorder.oom(96 * MIB, 5 * MIB, IN_FORWARD)
    found = diagnose_memory(facts_of_snapshot(snapshot_of(recorder.content(), "x")))
    assert found.kind is FindingKind.PEAK
    assert KEPT in found.changes[-1].why and "loss.item()" in found.changes[-1].line


def test_private_pools_are_nobody_elses() -> None:
    for pool, kind in (((0, 0), FindingKind.FRAGMENTATION), ((0, 1), FindingKind.FRAGMENTATION)):
        recorder = recorded(Mode(pool=pool), Loop(steps=4).record)
        recorder.oom(20 * MIB, 2 * MIB, IN_FORWARD)
        facts = facts_of_snapshot(snapshot_of(recorder.content(), "x"))
        found = diagnose_memory(facts)
        assert found.kind is kind
        assert (facts.private_bytes > 0) == (pool != (0, 0)) == ("private pools" in found.claim)
        assert (facts.phase, facts.site) == ("forward", FORWARD[0])


@pytest.mark.parametrize(
    ("stack", "module", "role"),
    [
        ((LINEAR, CALL, BLOCK, CALL, LOOP, MAIN), "run/model.py:22 forward", "forward"),
        ((LINEAR, CALL, ENTRY), "modules/linear.py:125 forward", "forward"),
        ((py("call", "/tmp/torchinductor_me/cabc.py", 9), CALL, LOOP, MAIN), "run/train.py:31 train", "forward"),
        ((py("f", "<eval_with_key>.7", 9), BLOCK, CALL, MAIN), "run/model.py:22 forward", "forward"),
        ((py("forward", "<ipython-input-4-ab>", 9), CALL, py("<module>", "<ipython-input-5-cd>", 1)),
         "<ipython-input-4-ab>:9 forward", "forward"),
        ((py("forward", "C:\\run\\model.py", 9), py("_call_impl", "C:\\env\\Lib\\torch\\nn\\modules\\module.py", 5)),
         "run/model.py:9 forward", "forward"),
        ((*IN_FORWARD[:7], py("closure", f"{SITE}/lightning/pytorch/loops/automatic.py", 129), *IN_STEP[1:]),
         "run/model.py:22 forward", "forward"),
        ((LINEAR, CALL, BLOCK, py("recompute_fn", CHECKPOINT, 1657),
          py("unpack_hook", CHECKPOINT, 1135), LOOP, MAIN), "run/model.py:22 forward", "recompute"),
        ((BLOCK, py("backward", CHECKPOINT, 290), EVALUATES),
         "run/model.py:22 forward", "recompute"),
        ((py("backward", "/home/me/run/ops.py", 12), py("apply", f"{SITE}/torch/autograd/function.py", 307),
          EVALUATES), "run/ops.py:12 backward", "backward"),
        ((cpp("at::_ops::sum_dim_IntList::call(at::Tensor const&)"), EVALUATES), "aten::sum_dim_IntList", "backward"),
        ((py("train", "/home/me/torch/train.py", 5), MAIN), "torch/train.py:5 train", "unknown"),
        ((py("forward", "/usr/lib/python3/dist-packages/transformers/models/llama/modeling_llama.py", 240), CALL,
          ENTRY), "llama/modeling_llama.py:240 forward", "forward"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stacks", ["python", "all"])
def test_places_and_roles_of_stacks(stacks: str, stack: tuple, module: str, role: str) -> None:  # type: ignore[type-arg]
    recorder = Recorder(Mode(stacks=stacks))
    recorder.alloc(MIB, stack)
    (label,) = device_of(recorder).timeline.labels
    assert (label.module, label.role) == (module, role)


def test_generated_code_names_the_models_line() -> None:
    recorder = Recorder(Mode(stacks="python"))
    trace = "".join(f'File "/home/me/run/model.py", line {line}, in forward\n    x\n' for line in (48, 22))
    generated = py("forward", "fx_generated/aten.py", 9) | {"fx_node_name": "mm", "fx_original_trace": trace}
    recorder.alloc(MIB, (generated, CALL, LOOP, MAIN))
    assert device_of(recorder).timeline.labels[0].module == "run/model.py:22 forward"


@pytest.mark.parametrize("name", [name for name in ALL if not ALL[name].older])
def test_torch_and_every_command_read_them(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = recorded(ALL[name], Loop(steps=4).record).content()
    assert "total_allocated: 48.0MiB" in _memory_viz.segsum(content)
    assert "Device 0" in _memory_viz.trace(content)
    file = tmp_path / "x.pickle"
    file.write_bytes(pickle.dumps(content))
    assert read_snapshot(file).busiest.timeline.end_bytes == 48 * MIB
    for command in (
        ["doctor", "--oom", str(file)],
        ["profile", str(file)],
        ["report", str(file), "--out", str(file) + ".html"],
    ):
        assert run(command) == 0
        said = capsys.readouterr().out
        assert ".cpp" not in said and "gather" not in said


@pytest.mark.parametrize("name", EVENTS_HAVE_STACKS)
def test_gradients_have_a_role(name: str) -> None:
    """Their stacks, of the engine's thread, do not say so: they are there when the optimizer steps."""
    device = snapshot_of(recorded(EVENTS_HAVE_STACKS[name], Loop(steps=6).record).content(), "x").busiest
    before, after = device.timeline, device.with_gradients
    assert (before.live_bytes == after.live_bytes).all()
    made = [n for n, at in enumerate(after.label_of.tolist()) if after.labels[at].role == "gradients"]
    assert {int(after.nbytes[n]) for n in made} == {4 * MIB}
    was = {before.labels[int(before.label_of[n])].role for n in made}
    assert was <= {"backward", "unknown"}
    assert not any(label.role == "gradients" for label in before.labels)  # causes are told from the stacks alone
