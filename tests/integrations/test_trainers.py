"""Other people's training loops on their real libraries: with a budget and without, the same losses and parameters."""

from __future__ import annotations

import itertools
import re
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import jettison
from jettison.core.errors import UnsupportedModule, UsageError
from jettison.core.units import Bytes, format_bytes
from jettison.dryrun.counter import measured_peak, static_tensors
from jettison.integrations.transformers import TransformersPlan, auto_checkpoint_trainer
from jettison.runtime.planned_forward import PlannedForward
from support.toys import Mlp

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS, LAYERS, STEPS = 290, 6, 3
NAMES = ("<unk>", "<pad>", "<s>", "</s>")


def llama(seed: int = 0) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    ids = {"pad_token_id": WORDS + 1, "bos_token_id": WORDS + 2, "eos_token_id": WORDS + 3}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS + 4, **shape, **ids))
    return model


class Rows(Dataset[dict[str, Tensor]]):
    """The same rows whenever they are asked for."""

    length = 64

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, WORDS, (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def text(start: int, length: int) -> str:
    return " ".join(f"w{(7 * start + 13 * i) % WORDS}" for i in range(length))


def tokenizer() -> Any:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = [*(f"w{i}" for i in range(WORDS)), *NAMES]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=NAMES[0])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), NAMES, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)


def measured(base: Any) -> Any:
    """A trainer that measures its steps; not those on fake tensors."""

    class Measured(base):  # type: ignore[misc]
        def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            own = super().training_step
            if isinstance(next(model.parameters()), FakeTensor):
                return own(model, inputs, *args, **kwargs)
            reference = getattr(self, "ref_model", None)
            alive = [*static_tensors(model, inputs, self.optimizer), *(reference.parameters() if reference else ())]
            found: list[Any] = []
            step = measured_peak(lambda: found.append(own(model, inputs, *args, **kwargs)), static_tensors=alive)
            self.peaks = [*getattr(self, "peaks", []), step.peak_bytes]
            return found[0]

    return Measured


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "use_cpu": True}
    return kind(str(folder), per_device_train_batch_size=8, max_steps=STEPS, seed=3, **quiet, **more)


def plain_trainer(folder: Path, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    made = arguments(transformers.TrainingArguments, folder, **more)
    return measured(transformers.Trainer)(llama(), made, train_dataset=Rows())


def sft(folder: Path) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [text(i, 60) for i in range(64)]})
    made = arguments(trl.SFTConfig, folder, max_length=64, gradient_checkpointing=False, bf16=False)
    return measured(trl.SFTTrainer)(llama(), made, train_dataset=rows, processing_class=tokenizer())


def dpo(folder: Path) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    columns = {"prompt": (0, 10), "chosen": (1, 40), "rejected": (2, 40)}
    rows = {name: [text(i + shift, length) for i in range(64)] for name, (shift, length) in columns.items()}
    made = arguments(trl.DPOConfig, folder, max_length=64, gradient_checkpointing=False, bf16=False)
    data = datasets.Dataset.from_dict(rows)
    return measured(trl.DPOTrainer)(
        llama(), ref_model=llama(1), args=made, train_dataset=data, processing_class=tokenizer()
    )


def grpo(folder: Path) -> Any:
    """What it trains on is written by its model, inside of its step."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    off = {"gradient_checkpointing": False, "bf16": False}
    made = arguments(trl.GRPOConfig, folder, num_generations=4, max_completion_length=16, beta=0.1, **off)
    data = datasets.Dataset.from_dict({"prompt": [text(i, 40) for i in range(64)]})
    llama().save_pretrained(folder / "start")  # its reference is read from there once more
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "start")
    rewards = {"reward_funcs": lambda completions, **_: [float(len(set(one))) for one in completions]}
    return measured(trl.GRPOTrainer)(model, args=made, train_dataset=data, processing_class=tokenizer(), **rewards)


def accumulating(folder: Path) -> Any:
    return plain_trainer(folder, gradient_accumulation_steps=2)


def in_bf16(folder: Path) -> Any:
    return plain_trainer(folder, bf16=True)


def of_growing_length(folder: Path) -> Any:
    """Every batch is longer than the one before."""
    trainer = plain_trainer(folder)
    lengths = itertools.count(24, 20)

    def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        length = next(lengths)
        return {name: torch.stack([row[name][:length] for row in rows]) for name in rows[0]}

    trainer.data_collator = collated
    return trainer


class ShorterLater(Rows):
    """Rows of the full length for one batch, then shorter ones among them."""

    length = 256

    def __init__(self) -> None:
        self.given = itertools.count()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        lengths = (256,) if (number := next(self.given)) < 8 else (256, 140, 83)
        return {name: ids[: lengths[number % len(lengths)]] for name, ids in super().__getitem__(index).items()}


def padded(folder: Path, **more: Any) -> Any:
    """Transformers leaves a mask of ones out, as of the first batch; attention with a mask takes more memory."""
    transformers = pytest.importorskip("transformers")
    trainer = plain_trainer(folder, **more)
    trainer.train_dataset, trainer.data_collator = ShorterLater(), transformers.DataCollatorForSeq2Seq(tokenizer())
    return trainer


def padded_in_bf16(folder: Path) -> Any:
    return padded(folder, bf16=True)


def trained(trainer: Any) -> tuple[list[dict[str, float]], list[Tensor]]:
    """What was logged of each step but its time, and parameters."""
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, of what is deprecated
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    logged = [{name: value for name, value in entry.items() if name != "step_time"} for entry in steps]
    return logged, [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        *(
            pytest.param(m, marks=pytest.mark.slow)
            for m in (in_bf16, of_growing_length, sft, dpo, accumulating, grpo, padded_in_bf16)
        ),
        padded,
    ],
)
def test_a_trainer_keeps_its_budget(make: Callable[[Path], Any], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, planned = make(tmp_path / "plain"), make(tmp_path / "planned")
    logged, parameters = trained(plain)
    budget = Bytes(0.88 * max(plain.peaks))
    handle = auto_checkpoint_trainer(planned, budget)
    with pytest.raises(UsageError, match="at the trainer's first batch"):
        handle.report()
    again, same = trained(planned)
    assert len(logged) == STEPS
    assert again == logged
    assert all(map(torch.equal, same, parameters))
    assert handle.applied is not None
    assert max(planned.peaks) <= budget
    predicted = max(shape.peak_bytes for shape in handle.applied.shapes())
    assert max(planned.peaks) == pytest.approx(predicted, rel=0.03)
    assert handle.report() == handle.applied.report() and handle.memory() is None
    assert repr(handle).startswith(f"<TransformersPlan: budget {format_bytes(budget)}, predicted peak ")
    handle.remove()
    assert "training_step" not in vars(planned)
    assert not any(isinstance(module.forward, PlannedForward) for module in planned.model.modules())


@pytest.mark.parametrize("budget", [0.9, "8", True])
def test_a_budget_is_refused_where_it_is_given(budget: Any) -> None:
    """And not when the first batch comes."""
    trainer = types.SimpleNamespace(training_step=None, args=types.SimpleNamespace())
    with pytest.raises(UsageError, match="got "):
        auto_checkpoint_trainer(trainer, budget)
    assert trainer.training_step is None


@pytest.mark.parametrize("given", [None, "8GiB", nn.Linear(2, 2)])
def test_what_is_no_trainer_is_named(given: Any) -> None:
    with pytest.raises(UsageError, match=r"as a trainer; expected one that has training_step\(\)"):
        auto_checkpoint_trainer(given, "8GiB")


def test_planning_in_a_trainer_says_a_line_before_and_one_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    made = arguments(transformers.TrainingArguments, tmp_path)
    trainer = transformers.Trainer(llama(), made, train_dataset=Rows())
    plan = jettison.integrations.transformers.auto_checkpoint_trainer(trainer, 2**30)
    trainer.args.max_steps = 1
    with caplog.at_level("INFO"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    said = [record.getMessage() for record in caplog.records if record.name == "jettison"]
    assert said[0] == "planning LlamaForCausalLM under a budget of 1.00 GiB" and len(said) == 2
    assert re.fullmatch(
        r"planned LlamaForCausalLM: budget 1\.00 GiB, predicted peak .* MiB, overhead 0\.0 % \(took .* s\)", said[1]
    )
    assert len(plan.report()) == LAYERS + 1


def test_checkpointing_twice_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = plain_trainer(tmp_path, gradient_checkpointing=True)
    with pytest.raises(UnsupportedModule, match=r"set (activation|gradient)_checkpointing=False"):
        auto_checkpoint_trainer(trainer, "1GiB")


@pytest.mark.parametrize("switch", ["activation_checkpointing", "gradient_checkpointing", "torch_compile"])
def test_what_a_trainer_switches_on_is_refused_with_the_line_to_change(switch: str) -> None:
    trainer = types.SimpleNamespace(training_step=None, args=types.SimpleNamespace(**{switch: True}))
    with pytest.raises(UnsupportedModule, match=f"set {switch}=False"):
        auto_checkpoint_trainer(trainer, "1GiB")


def test_a_plan_can_be_taken_back_before_it_is_made(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path)
    TransformersPlan(trainer, "1GiB", {}).remove()
    assert "training_step" not in vars(trainer)


def test_a_step_that_was_set_on_the_trainer_is_there_again() -> None:
    def mine(*_: Any) -> None: ...

    def later(*_: Any) -> None: ...

    trainer = types.SimpleNamespace(training_step=mine)
    planned = TransformersPlan(trainer, "1GiB", {})
    assert trainer.training_step is not mine
    planned.remove()
    assert trainer.training_step is mine
    planned = TransformersPlan(trainer, "1GiB", {})
    trainer.training_step = later
    planned.remove()
    assert trainer.training_step is later


# PEFT and Accelerate: they need nothing but `auto_checkpoint` ---------------------------------------------------------


def tuned(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    some = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, modules_to_save=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what transformers has renamed
        found: nn.Module = peft.get_peft_model(model, some)
    return found


@pytest.mark.parametrize(
    ("lora", "prepared"),
    [(True, True), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((False, True), (True, False)))],
)
def test_what_accelerate_and_peft_make_keeps_a_budget(lora: bool, prepared: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    ids = torch.randint(0, WORDS, (8, 64), generator=torch.Generator().manual_seed(7))
    batch = {"input_ids": ids, "labels": ids}

    def run(budget: int | None) -> tuple[list[float], list[Tensor], int, Any]:
        model: Any = tuned(llama()) if lora else llama()
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
        accelerator = accelerate.Accelerator(cpu=True) if prepared else None
        if accelerator is not None:
            model, optimizer = accelerator.prepare(model, optimizer)
        handle = None
        if budget is not None:
            handle = jettison.auto_checkpoint(model, batch, Bytes(budget), optimizer=optimizer, keep_output=False)
        losses, peaks = [], []
        torch.manual_seed(9)

        def step() -> None:
            loss = model(**batch).loss
            accelerator.backward(loss) if accelerator is not None else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        for _ in range(STEPS):
            peaks.append(measured_peak(step, static_tensors=static_tensors(model, batch, optimizer)).peak_bytes)
        return losses, [p.detach().clone() for p in model.parameters()], max(peaks), handle

    losses, parameters, peak, _ = run(None)
    again, same, lower, handle = run(int(0.88 * peak))
    assert again == losses
    assert all(map(torch.equal, same, parameters))
    assert lower <= int(0.88 * peak)
    assert lower == pytest.approx(handle.plan.predicted.peak_bytes, abs=256)


# Lightning ------------------------------------------------------------------------------------------------------------


class Numbers(Dataset[tuple[Tensor, int]]):
    """Rows and classes."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(16, generator=torch.Generator().manual_seed(index)), index % 4


def lightning_run(folder: Path, callbacks: list[Any], **more: Any) -> tuple[list[float], list[Tensor], int]:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(16, 64), *(Mlp(64, 256, 0.1) for _ in range(8)), nn.Linear(64, 4))
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, _index: int) -> Any:
            rows, classes = batch
            loss = functional.cross_entropy(self.model(rows), classes)
            self.log("loss", loss)
            return {"loss": loss}

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].detach())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
            def step() -> None:
                optimizer.step(closure=closure)

            if index == 0:  # planning runs within, and profiles by itself
                step()
                return
            alive = static_tensors(self, torch.empty(128, 18), optimizer)  # rows, and classes of 8 bytes
            peaks.append(measured_peak(step, static_tensors=alive).peak_bytes)

    peaks: list[int] = []
    torch.manual_seed(0)
    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            enable_model_summary=False,
            callbacks=callbacks,
            default_root_dir=folder,
            **quiet,
            **more,
        )
        loader = DataLoader(Numbers(), batch_size=128, shuffle=True)
        torch.manual_seed(1)
        trainer.fit(module, loader)
    assert "training_step" not in vars(module)
    return [float(loss) for loss in module.losses], [p.detach().clone() for p in module.parameters()], max(peaks)


@pytest.mark.parametrize("more", [{}, pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.slow)])
def test_lightning_keeps_its_budget(more: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from jettison.integrations.lightning import AutoCheckpoint

    losses, parameters, plain = lightning_run(tmp_path, [], **more)
    callback = AutoCheckpoint(int(0.9 * plain))
    with pytest.raises(UsageError, match="at the trainer's first batch"):
        callback.memory()
    again, same, peak = lightning_run(tmp_path, [callback], **more)
    assert again == losses
    assert all(map(torch.equal, same, parameters))
    assert callback.applied is not None
    assert callback.applied.plan is not None
    assert callback.report() == callback.applied.report() and callback.memory() is None
    assert repr(callback).startswith("<AutoCheckpoint: budget ")
    assert peak <= int(0.9 * plain)
    assert peak == pytest.approx(callback.applied.plan.predicted.peak_bytes, rel=0.03)


def test_lightning_modules_whose_step_was_set_are_refused_and_an_interrupted_one_has_its_own() -> None:
    lightning = pytest.importorskip("lightning")
    from jettison.integrations.lightning import AutoCheckpoint

    module, callback = lightning.LightningModule(), AutoCheckpoint("1GiB")
    callback.on_train_start(None, module)
    assert "training_step" in vars(module)
    callback.on_exception(None, module, KeyboardInterrupt())
    assert "training_step" not in vars(module)
    mine = module.training_step = lambda *_: None
    with pytest.raises(UnsupportedModule, match=r"training_step was set .* torch\.compile"):
        callback.on_train_start(None, module)
    callback.on_exception(None, module, KeyboardInterrupt())
    assert module.training_step is mine
