"""Weights of transformers' models in and out: read by every layout, written by every layout, logits to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("torch without torch.distributed", allow_module_level=True)

import transformers
from safetensors.torch import load_file, save_file
from test_train_building import OfReal, digest, digests, ready
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from jettison.cli.main import run
from jettison.cli.train import train, write_weights
from jettison.core.errors import UsageError
from jettison.dryrun.counter import unique_bytes
from jettison.train.export_weights import ExportFailed, export_session
from jettison.train.recipe import (
    BatchSection,
    CheckpointSection,
    ExportSection,
    LayoutSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    TrainRecipe,
)
from support.ranks import run_ranks

SIZES = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2}
LLAMA = transformers.LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    **SIZES,
)
TIED = transformers.Qwen3Config(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    **SIZES,
)
GPT2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **SIZES)
IDS = torch.arange(40).view(2, 20) * 5 % 256


def saved(config: Any, folder: Path, *, dtype: torch.dtype = torch.float32, most: str = "60KB") -> Path:
    """A model as transformers writes it, in several files."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=most)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def recipe(folder: Path, pretrained: Path, layout: LayoutSection | None = None, **more: Any) -> TrainRecipe:
    values: dict[str, Any] = {
        "model": ModelSection(pretrained=str(pretrained)),
        "batch": BatchSection(global_batch=8, micro_batch=2, seq=16),
        "steps": 2,
        "layout": layout or LayoutSection(),
        "optimizer": OptimizerSection(lr=1e-2),
        "log": LogSection(folder=str(folder / "log"), memory_steps=0),
        "export": ExportSection(folder=str(folder / "out"), max_file="100kB"),
    }
    return TrainRecipe(**values | more)


def logits(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def losses(folder: Path) -> list[float]:
    entries = map(json.loads, (folder / "log" / "log.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if entry["event"] == "step"]


# one process ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "dtype"), [(LLAMA, torch.bfloat16), (TIED, torch.float32), (GPT2, torch.float32)])
def test_in_and_out_is_the_same_to_the_bit(config: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    source = saved(config, tmp_path / "in", dtype=dtype)
    assert len(list(source.glob("*.safetensors"))) > 1
    expected = {name: t.float() for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    with ready(recipe(tmp_path, source)) as session:
        held = digests(session)
        export_session(session)
    assert held == {name: digest(t) for name, t in expected.items()}
    out = tmp_path / "out"
    assert torch.equal(logits(out), logits(source))
    assert all(file.stat().st_size < 110_000 for file in out.glob("*.safetensors"))
    written = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], t) for name, t in expected.items())
    found = {path.name for path in out.iterdir() if path.suffix != ".safetensors"}
    assert found == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}
    there = json.loads((source / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == there | {"dtype": "float32"}


def test_a_run_goes_on_from_pretrained_weights_as_a_loop_by_hand_does(tmp_path: Path) -> None:
    source = saved(LLAMA, tmp_path / "in")
    result = train(recipe(tmp_path, source, checkpoint=CheckpointSection(folder=str(tmp_path / "ck"))))
    assert result.export == str(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    with ready(recipe(tmp_path / "again", source)) as session:
        batches = [session.batches.rows(0, micro)[:, :-1] for micro in range(4)]
    with torch.no_grad():
        by_hand = torch.stack([model(input_ids=rows, labels=rows).loss / 4 for rows in batches]).sum()
    assert losses(tmp_path)[0] == by_hand.item()
    assert not torch.equal(logits(tmp_path / "out"), logits(source))
    only = write_weights(
        recipe(tmp_path, source, checkpoint=CheckpointSection(folder=str(tmp_path / "ck"))), str(tmp_path / "later")
    )
    said = {"schema": "jettison.weights/1", "step": 2, "export": str(tmp_path / "later")}
    assert only.document() == {**said, "request": None}
    assert torch.equal(logits(tmp_path / "later"), logits(tmp_path / "out"))


def test_the_command_writes_a_runs_newest_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(LLAMA, tmp_path / "in")
    text = (
        f'steps = 2\n[model]\npretrained = "{source}"\n[batch]\nglobal_batch = 2\nmicro_batch = 2\nseq = 16\n'
        f'[checkpoint]\nfolder = "{tmp_path / "ck"}"\nevery = 1\n[log]\nfolder = "{tmp_path / "log"}"\n'
    )
    (tmp_path / "r.toml").write_text(text)
    words = ["train", str(tmp_path / "r.toml"), "--export", str(tmp_path / "out")]
    assert run(words) == 2
    assert "--resume: there is no checkpoint in" in capsys.readouterr().err
    assert run([*words[:2], "--steps", "1"]) == 0
    capsys.readouterr()
    assert run(words) == 0
    assert capsys.readouterr().out.strip() == f"the weights of step 1: {tmp_path / 'out'}"
    assert not torch.equal(logits(tmp_path / "out"), logits(source))
    assert run(words) == 2
    assert "is there already" in capsys.readouterr().err


def test_random_models_are_written_too(tmp_path: Path) -> None:
    """The reference Llama is transformers' one under other names; dtypes are the recipe's."""
    model = ModelSection(architecture="llama", layers=2, hidden=64, heads=4)
    export = ExportSection(folder=str(tmp_path / "out"))
    made = replace(recipe(tmp_path, tmp_path), model=model, export=export)
    with ready(made) as session:
        export_session(session)
        rows = torch.cat([IDS, IDS[:, :1]], 1)
        with torch.no_grad():
            here = session.engine.parts[0](rows[:, :-1])
    torch.testing.assert_close(logits(tmp_path / "out"), here, rtol=1e-5, atol=1e-5)
    with ready(replace(made, export=replace(export, dtype="bf16", overwrite=True))) as session:
        export_session(session)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(next((tmp_path / "out").glob("*.safetensors"))).values()} == {torch.bfloat16}


def test_what_is_not_written(tmp_path: Path) -> None:
    made = recipe(tmp_path, saved(LLAMA, tmp_path / "in"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep me")
    with pytest.raises(
        UsageError, match=r"export.folder: .*out is there already; name another, or set overwrite = true"
    ):
        train(made)
    assert (tmp_path / "out" / "mine").read_text() == "keep me"
    assert not (tmp_path / "log").exists()
    for model in (ModelSection(architecture="gpt"), ModelSection(factory="support.train_models:tiny")):
        with pytest.raises(UsageError, match=r"export: transformers has no model like (Gpt|Tiny)"):
            train(replace(made, model=model, export=ExportSection(folder=str(tmp_path / "other"))))


def test_a_model_of_a_config_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(LLAMA.to_json_string())
    made = replace(recipe(tmp_path, tmp_path), model=ModelSection(config=str(tmp_path / "tiny.json")))
    with ready(made) as session:
        export_session(session)
        with torch.no_grad():
            here = session.engine.parts[0].eval()(input_ids=IDS).logits
    assert torch.equal(logits(tmp_path / "out"), here)


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(tmp_path, saved(LLAMA, tmp_path / "in"))
    made = replace(made, export=replace(made.export, overwrite=True))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep me")

    def full(*_: Any, **_more: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, ready(made) as session:
        patched.setattr(HuggingFaceStorageWriter, "finish", full)
        with pytest.raises(ExportFailed, match=r"could not be written to .*out: .*No space left on device"):
            export_session(session)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    assert not (tmp_path / "out.partial").exists()
    with ready(made) as session:
        export_session(session)
    assert (tmp_path / "out" / "config.json").exists() and not (tmp_path / "out" / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: spoil(f, lambda t: t.pop("model.norm.weight")), "it lacks model.norm.weight"),
        (lambda f: spoil(f, lambda t: t.update({"more": torch.ones(2)})), "it also has more"),
        (
            lambda f: spoil(f, lambda t: t.update({"model.norm.weight": torch.ones(3)})),
            r"model.norm.weight in .* is \[3\] of torch.float32; the model has \[64\]",
        ),
        (
            lambda f: spoil(f, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.float8_e4m3fn)})),
            "model.norm.weight in .* is F8_E4M3; expected one of F64, F32, F16, BF16",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"not much"), "model.safetensors cannot be read"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
            "model.safetensors cannot be read",
        ),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "has pytorch_model.bin, a pickle, which"),
        (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json cannot be read"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            "names b.safetensors, which is not there",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    folder = saved(LLAMA, tmp_path / "in", most="1GB")
    change(folder)
    with pytest.raises(UsageError, match=says):
        train(recipe(tmp_path, folder))
    assert not (tmp_path / "out").exists()


def test_two_names_of_one_parameter_have_to_agree(tmp_path: Path) -> None:
    folder = saved(TIED, tmp_path / "in", most="1GB")
    spoil(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    with ready(recipe(tmp_path / "a", folder)):
        pass
    spoil(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(UsageError, match=r"lm_head.weight in .* differ, and are one parameter"):
        train(recipe(tmp_path / "b", folder))


def test_names_without_the_prefix_and_files_beside(tmp_path: Path) -> None:
    """As the hub's GPT-2 is: without the name of its body, with masks that are no weights, beside a second format."""
    folder = saved(GPT2, tmp_path / "in", most="1GB")
    tensors = load_file(folder / "model.safetensors")
    short = {name.removeprefix("transformer."): t for name, t in tensors.items()} | {
        "h.0.attn.bias": torch.ones(1, 1, 4, 4)
    }
    save_file(short, folder / "model.safetensors")
    save_file({"other": torch.ones(1)}, folder / "consolidated.safetensors")
    with ready(recipe(tmp_path, folder)) as session:
        assert digests(session) == {name: digest(t) for name, t in tensors.items()}


def test_a_reference_llama_is_refused_what_it_does_not_do(tmp_path: Path) -> None:
    other = transformers.LlamaConfig(**LLAMA.to_dict() | {"rms_norm_eps": 1e-6, "attention_bias": True})
    folder = saved(other, tmp_path / "in")
    model = ModelSection(pretrained=str(folder), code="reference")
    with pytest.raises(UsageError, match=r"it has rms_norm_eps 1e-06, not 1e-05; attention_bias True, not False; set"):
        train(replace(recipe(tmp_path, folder), model=model))


# on ranks -------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "llama": {
        "ddp": LayoutSection(),
        "zero3": LayoutSection(zero=3),
        "tp under zero3": LayoutSection(tp=2, zero=3),
        "stages": LayoutSection(pp=2, tp=2),
        "stages under zero": LayoutSection(pp=2, virtual_stages=2, zero=2),
    },
    "qwen": {"zero3": LayoutSection(zero=3), "tp": LayoutSection(tp=2)},
    "gpt2": {"tp under zero3": LayoutSection(tp=2, zero=3)},
}
QUICK = [("llama", "zero3"), ("llama", "stages under zero"), ("gpt2", "tp under zero3")]
"""Those that `make test` runs."""
OTHERS = [(family, name) for family in LAYOUTS for name in LAYOUTS[family] if (family, name) not in QUICK]


def on_ranks(args: dict[str, Any]) -> dict[str, Any]:
    folder = Path(args["folder"])
    out: dict[str, Any] = {}
    with ExitStack() as open_until_all_are_read:
        for family, name in args["cases"]:
            layout = LAYOUTS[family][name]
            code = "reference" if layout.pp > 1 else None
            made = recipe(folder / family / name, folder / family / "in", layout)
            made = replace(made, model=replace(made.model, code=code))
            counter = OfReal(device="cpu")
            with counter:
                session = open_until_all_are_read.enter_context(ready(made))
            held = [p.to_local() if isinstance(p, DTensor) else p for p in session.parameters]
            out[f"{family} {name}"] = digests(session)
            out.setdefault("peaks", {})[f"{family} {name}"] = [unique_bytes(held), counter.peak_bytes]
            export_session(session)
    return out


def read_and_written(folder: Path, cases: list[tuple[str, str]]) -> Path:
    """The folder of models that ranks have read and written, with what they found."""
    for name, config in (("llama", LLAMA), ("qwen", TIED), ("gpt2", GPT2)):
        saved(config, folder / name / "in")
    found = run_ranks(on_ranks, 4, {"folder": str(folder), "cases": cases})
    (folder / "digests.json").write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return read_and_written(tmp_path_factory.mktemp("pretrained"), QUICK)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return read_and_written(tmp_path_factory.mktemp("others"), OTHERS)


@pytest.mark.parametrize(("family", "name"), QUICK)
def test_ranks_read_and_write_the_same_weights(found: Path, family: str, name: str) -> None:
    assert_same_weights(found, family, name)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), OTHERS)
def test_ranks_of_other_layouts_read_and_write_the_same_weights(others: Path, family: str, name: str) -> None:
    assert_same_weights(others, family, name)


def assert_same_weights(found: Path, family: str, name: str) -> None:
    source = found / family / "in"
    expected = {n: t for file in source.glob("*.safetensors") for n, t in load_file(file).items()}
    known = {digest(t) for t in expected.values()}
    read: dict[str, str] = {}
    for rank in json.loads((found / "digests.json").read_text()):
        read |= rank[f"{family} {name}"]
    assert len(read) == len(expected) and set(read.values()) <= known | {
        digest(t.contiguous()) for t in regrouped(expected)
    }
    out = found / family / name / "out"
    written = {n: t for file in out.glob("*.safetensors") for n, t in load_file(file).items()}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[n], t) for n, t in expected.items())
    assert torch.equal(logits(out), logits(source))


@pytest.mark.parametrize("name", [name for family, name in QUICK if family == "llama"])
def test_a_rank_reads_its_share(found: Path, name: str) -> None:
    assert_share(found, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp under zero3", "stages"])  # not ddp, whose buckets are gradients
def test_a_rank_of_another_layout_reads_its_share(others: Path, name: str) -> None:
    assert_share(others, name)


def assert_share(found: Path, name: str) -> None:
    """And holds no more than a part of one tensor beside it: the largest has 64 KiB."""
    for rank in json.loads((found / "digests.json").read_text()):
        share, peak = rank["peaks"][f"llama {name}"]
        assert share < peak <= share + 65536 + 4096


def regrouped(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Tensor parallelism gives GPT-2's projection of q, k and v a dim more: the same bytes."""
    return [t for name, t in tensors.items() if "c_attn" in name]
