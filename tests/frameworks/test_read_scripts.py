"""Training scripts in Python, of TRL, a Trainer and Unsloth, with literal arguments; and commands of a shell script."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.core.errors import UsageError
from jettison.frameworks.config_file import read_config_file
from jettison.frameworks.run_file import RunFile, read_run
from jettison.predict.forecast import forecast
from jettison.request.resolve import resolve

SFT = """
import argparse
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

MODEL = "meta-llama/Llama-2-7b-hf"
LENGTH = 1024
dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def load(name=MODEL):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return AutoModelForCausalLM.from_pretrained(name, quantization_config=quantization, dtype=dtype)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=2)
    options = parser.parse_args()
    args = SFTConfig(
        output_dir="out",
        max_length=2 * LENGTH,
        per_device_train_batch_size=options.batch_size,  # pairs of rows
        gradient_accumulation_steps=int("4"),
        gradient_checkpointing=True,
        report_to="none" if options.batch_size == 2 else "wandb",
    )
    settings = dict(rank=8) if MODEL == "gpt2" else {"rank": 16}
    lora = LoraConfig(r=settings['rank'], target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(model=load(), args=args, peft_config=lora)
    trainer.train()
    AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)  # to merge the adapters


if __name__ == "__main__":
    main()
"""
TRAINER = """
from transformers import *
model = AutoModelForCausalLM.from_pretrained("gpt2")
args = TrainingArguments("out", per_device_train_batch_size=4, bf16=True, optim="adamw_torch")
args.gradient_checkpointing = True
trainer = Trainer(model, args, train_dataset=data.map(lambda row: tokenizer(row["text"], max_length=512)))
trainer.train()
"""
UNSLOTH = """
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-3-8b-bnb-4bit", max_seq_length=1024)
model = FastLanguageModel.get_peft_model(model, r=32, target_modules=["q_proj", "v_proj"])
trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, optim="adamw_8bit"))
trainer.train()
"""


def given(found: RunFile) -> dict[str, Any]:
    return {name: getattr(found.request, name) for name in found.request.given()}


def script(tmp_path: Path, text: str, name: str = "train.py", *changes: tuple[str, str]) -> Path:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_a_script_of_trl_field_by_field(tmp_path: Path) -> None:
    found = read_run(script(tmp_path, SFT))
    assert (found.says, found.model, found.unread) == ("a TRL script", "llama2-7b", ())
    assert given(found) == {
        "like": "huggingface",
        "seq": 2048,
        "micro_batch": 2,
        "micro_batches": 4,
        "precision": "bf16-pure",
        "optimizer": "adamw",
        "loss": "tiled",
        "recompute": "full",
        "lora": "r=16,targets=q_proj+v_proj",
        "base": "nf4-double",
        "pad_to_longest": True,
    }
    assert any("command line and environment have their defaults: batch_size = 2" in note for note in found.notes)
    assert "SFTConfig().max_length = 2048" in map(str, found.used)


def test_a_script_says_the_same_as_its_arguments(tmp_path: Path) -> None:
    """The bytes of a script and of the same run as TRL's command line."""
    command = script(
        tmp_path,
        "trl sft --model_name_or_path meta-llama/Llama-2-7b-hf --dtype bfloat16 --max_length 2048 --load_in_4bit "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --use_peft --lora_r 16 --lora_dropout 0 "
        "--use_bnb_nested_quant --lora_target_modules q_proj v_proj\n",
        "run.sh",
    )
    one, other = (read_run(path) for path in (script(tmp_path, SFT), command))
    assert given(one) == given(other)
    peaks = [forecast(resolve(found.spec(), found.request).run).peak_bytes for found in (one, other)]
    assert peaks[0] == peaks[1] > 4 << 30


@pytest.mark.parametrize(
    ("old", "new", "line", "key"),
    [
        ("max_length=2 * LENGTH", "max_length=longest(data)", 22, "SFTConfig().max_length = longest(...)"),
        ("gradient_checkpointing=True", "gradient_checkpointing=os.name", 26, "SFTConfig().gradient_checkpointing = "),
        ("r=settings['rank']", "r=settings['other']", 30, "LoraConfig().r = settings['other']"),
        ("output_dir=", "**more, output_dir=", 22, "SFTConfig().**more = more"),
        ("LENGTH = 1024", "LENGTH = 1024\nfor LENGTH in lengths: pass", 23, "SFTConfig().max_length = 2 * LENGTH"),
        ("load(name=MODEL)", "load(name=MODEL, load_in_8bit=False)", 0, ""),
    ],
)
def test_what_is_no_literal_is_named_with_its_line(tmp_path: Path, old: str, new: str, line: int, key: str) -> None:
    path = script(tmp_path, SFT, "train.py", (old, new))
    if not key:
        assert not read_run(path).unread
        return
    with pytest.raises(UsageError, match="its value is not a literal") as refused:
        read_run(path)
    (unread,) = read_run(path, allow_unread=True).unread
    assert str(unread).startswith(key) and str(unread) in str(refused.value)
    assert line - 4 <= int(unread.why.removeprefix("line ").partition(":")[0]) <= line + 4


def test_a_module_that_makes_a_trainer_is_a_script(tmp_path: Path) -> None:
    """Also one that another file runs; what no flag replaces is named by its line, whatever its value might be."""
    module = SFT.partition('if __name__ == "__main__":')[0]
    assert given(read_run(script(tmp_path, module))) == given(read_run(script(tmp_path, SFT, "whole.py")))
    capable = ("torch.cuda.is_bf16_supported()", "torch.cuda.get_device_capability()[0] >= 8")
    assert given(read_run(script(tmp_path, module, "train.py", capable)))["base"] == "nf4-double"
    unknown = script(tmp_path, module, "train.py", ('output_dir="out"', "optim=settings_of(run).optim"))
    with pytest.raises(UsageError, match=r"optim = settings_of\(run\)\.optim \(line 23: its value is not a literal\)"):
        read_run(unknown)
    (targets,) = read_run(
        script(tmp_path, SFT, "train.py", ('["q_proj", "v_proj"]', "linear_layers(model)")), allow_unread=True
    ).unread
    assert (targets.name, targets.why.endswith("not a literal")) == ("LoraConfig().target_modules", True)
    assert not read_run(tmp_path / "train.py", asked={"lora": "r=16,targets=all-linear"}).unread


@pytest.mark.parametrize(
    ("old", "new", "base"),
    [
        ("quantization = B", "quantization = None if LENGTH < 4096 else B", None),
        ("quantization = B", "quantization = None if LENGTH > 4096 else B", "nf4-double"),
        ("quantization = B", "quantization = None if small(LENGTH) else B", "?"),
        ("    quantization = B", "    if small(LENGTH):\n        quantization = B", "?"),
        ("    quantization = B", "    with device:\n        quantization = B", "nf4-double"),
        ("model=load()", "model=load() if small(LENGTH) else None", "?"),
    ],
)
def test_a_call_that_may_not_run_counts_as_unknown(tmp_path: Path, old: str, new: str, base: str | None) -> None:
    path = script(tmp_path, SFT, "train.py", (old, new))
    if base != "?":
        assert given(read_run(path)).get("base") == base
        return
    with pytest.raises(UsageError, match=r"load_in_4bit = True \(line \d+: its value is not a literal"):
        read_run(path)


def test_a_script_of_a_trainer(tmp_path: Path) -> None:
    found = read_run(script(tmp_path, TRAINER))
    own = given(found)
    assert (found.says, found.model, own["seq"], own["micro_batch"]) == ("arguments of a Trainer", "gpt2", 512, 4)
    assert (own["precision"], own["recompute"], own["optimizer"]) == ("bf16-autocast", "full", "adamw-foreach")
    assert any("weights are counted in fp32" in note for note in found.notes)
    uncertain = ("args.gradient_checkpointing = True", "if big(model):\n    args.gradient_checkpointing = True")
    with pytest.raises(UsageError, match=r"gradient_checkpointing = True \(line 6: its value is not a literal"):
        read_run(script(tmp_path, TRAINER, "train.py", uncertain))


def test_casts_of_a_script_that_prepares_a_model(tmp_path: Path) -> None:
    prepared = ("model=load()", "model=prepare_model_for_kbit_training(load())")
    own = given(read_run(script(tmp_path, SFT, "train.py", prepared)))
    assert (own["kbit_upcast"], own["precision"], own["recompute"]) == ("all", "bf16-autocast", "full")
    none = ("gradient_checkpointing=True", "gradient_checkpointing=False")
    assert given(read_run(script(tmp_path, SFT, "train.py", none)))["recompute"] == "none"
    assert given(read_run(script(tmp_path, SFT, "train.py", prepared, none)))["recompute"] == "full"


def test_a_script_of_unsloth(tmp_path: Path) -> None:
    found = read_run(script(tmp_path, UNSLOTH))
    assert (found.framework, found.model) == ("unsloth", "llama3-8b")
    assert given(found) == {
        "like": "unsloth",
        "seq": 1024,
        "micro_batch": 2,
        "optimizer": "adam8bit",
        "recompute": "full",
        "lora": "r=32,targets=q_proj+v_proj",
        "base": "nf4-double",
        "pad_to_longest": True,
    }
    plain = ("r=32", "use_gradient_checkpointing=False, r=32")
    own = given(read_run(script(tmp_path, UNSLOTH, "train.py", plain)))
    assert (own["recompute"], own["offload"]) == ("none", False)
    with pytest.raises(UsageError, match="full_finetuning = true"):
        read_run(script(tmp_path, UNSLOTH, "train.py", ("max_seq_length", "full_finetuning=True, max_seq_length")))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("r=32", 'r=32, modules_to_save=["embed_tokens", "lm_head"]'),
        ('"v_proj"', '"v_proj", "embed_tokens", "lm_head"'),
        ('"v_proj"]', '"v_proj", "lm_head"], modules_to_save=["embed_tokens"]'),
        ('["q_proj", "v_proj"]', '"all-linear", modules_to_save=["embed_tokens", "lm_head"]'),
    ],
)
def test_modules_that_unsloth_trains_in_full(tmp_path: Path, old: str, new: str) -> None:
    """Also among its targets. ``unsloth``: the frozen ones are on disk."""
    targets = "all-linear" if "all-linear" in new else "q_proj+v_proj"
    lora = f"r=32,targets={targets},modules_to_save=embed_tokens+lm_head"
    found = read_run(script(tmp_path, UNSLOTH, "train.py", (old, new)))
    assert found.request.lora == lora and not any("on disk" in note for note in found.notes)
    stored = ("r=32", 'r=32, use_gradient_checkpointing="unsloth"')
    found = read_run(script(tmp_path, UNSLOTH, "train.py", (old, new), stored))
    assert found.request.lora == lora and any("on disk" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "why"),
    [("GRPO", "generation and reward models during training"), ("KTO", "generation and reward models during training")],
)
def test_other_trainers_are_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_run(script(tmp_path, SFT.replace("SFT", name)))


@pytest.mark.parametrize("base", ["nn.Module", "torch.nn.Module"])
def test_a_module_of_a_scripts_own_is_refused(tmp_path: Path, base: str) -> None:
    made = f"class Scored({base}):\n    pass\nargs = TrainingArguments("
    changed = script(
        tmp_path, TRAINER, "train.py", ("args = TrainingArguments(", made), ("Trainer(model,", "Trainer(Scored(model),")
    )
    with pytest.raises(UsageError, match=r"nn\.Module = line 8 \(a module of the script.s own is not read"):
        read_run(changed)


@pytest.mark.parametrize("program", ["run_reward_models.py", "train_rm.py", "run_grpo_math.py"])
def test_programs_that_train_something_else(tmp_path: Path, program: str) -> None:
    command = f"python {program} --model_name_or_path $MODEL --max_length 512 --bf16\n"
    with pytest.raises(UsageError, match="generation and reward models during training"):
        read_run(script(tmp_path, command, "run.sh"))
    found = read_run(script(tmp_path, command.replace(program, "sft.py"), "run.sh"))
    with pytest.raises(UsageError, match="names no model; give it before --from"):
        assert found.model_argument


PARSED = """
import argparse, yaml
def settings(path="own/run.yaml"):
    with open(path) as file:
        return yaml.safe_load(file)
cfg = settings()
args = TrainingArguments("out", per_device_train_batch_size=cfg["train"]["batch"], bf16=cfg["train"].get("bf16", False))
model = AutoModelForCausalLM.from_pretrained(cfg["model"])
lora = LoraConfig(r=int(cfg["rank"]), target_modules=list(cfg["targets"]))
trainer = Trainer(get_peft_model(model, lora), args)
"""


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("bf16=True", "bf16=True, evaluation_strategy='no'", "SFTConfig().evaluation_strategy"),
        ("args=args", "args=args, tokenizer=words", "SFTTrainer().tokenizer"),
        ("args=args", "args=args, data_collator=DataCollatorForCompletionOnlyLM(ids, words)", "DataCollatorForCompl"),
    ],
)
def test_what_only_an_older_trl_takes(tmp_path: Path, old: str, new: str, key: str) -> None:
    text = """
args = SFTConfig("out", bf16=True, per_device_train_batch_size=2)
trainer = SFTTrainer(model=AutoModelForCausalLM.from_pretrained("gpt2"), args=args, train_dataset=rows)
trainer.train()
"""
    usual = given(read_run(script(tmp_path, text)))
    assert (usual["recompute"], usual["loss"], usual["optimizer"]) == ("full", "tiled", "adamw")
    found = read_run(script(tmp_path, text, "train.py", (old, new)))
    older = given(found)
    assert (older["recompute"], older["loss"], older["optimizer"]) == ("none", "upcast", "adamw-foreach")
    assert any(note.startswith(key) and "means TRL before 0.20" in note for note in found.notes)


def test_an_inference_server_of_a_script_is_refused(tmp_path: Path) -> None:
    text = """
server = LLM("gpt2")
rows = server.generate(prompts)
args = TrainingArguments("out", per_device_train_batch_size=2)
trainer = Trainer(AutoModelForCausalLM.from_pretrained("gpt2"), args, train_dataset=rows)
trainer.train()
"""
    with pytest.raises(UsageError, match=r"LLM = line 2 \(an inference server of the script's own"):
        read_run(script(tmp_path, text))


def test_values_of_a_file_that_a_script_parses(tmp_path: Path) -> None:
    path = script(tmp_path, PARSED)
    with pytest.raises(
        UsageError, match=r"per_device_train_batch_size = cfg\['train'\]\['batch'\] \(line 7: its value"
    ):
        read_run(path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "run.yaml").write_text(
        "model: gpt2\nrank: '4'\ntargets: [q_proj, v_proj]\ntrain: {batch: 3, bf16: true}\n"
    )
    found = read_run(path)
    assert (found.model, given(found)["micro_batch"], given(found)["lora"]) == ("gpt2", 3, "r=4,targets=q_proj+v_proj")
    assert given(found)["precision"] == "bf16-autocast"
    assert "own/run.yaml, which the script parses, is read too" in found.notes
    for other in ("model: [", "- 1\n", "a: b\n" * (1 << 18), "a: '\0'"):
        (tmp_path / "own" / "run.yaml").write_text(other)
        with pytest.raises(UsageError, match=r"line 7: its value is not a literal"):
            read_run(path)
    (tmp_path / "own" / "run.json").write_text('{"model": "gpt2", "rank": 4, "targets": [], "train": {"batch": 5}}')
    text = PARSED.replace("yaml.safe_load(file)", "json.loads(file.read())").replace("run.yaml", "run.json")
    assert given(read_run(script(tmp_path, text)))["micro_batch"] == 5


def test_a_file_that_a_scripts_command_line_names(tmp_path: Path) -> None:
    text = """
@dataclass
class SFTConfig:
    model: str = "gpt2"
    max_length: int = 64
    batch: int = field(default=2)
    bf16: bool = True

def load(path):
    return SFTConfig(**yaml.safe_load(Path(path).read_text()))

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
config = load(parser.parse_args().config)
args = TrainingArguments("out", bf16=config.bf16, per_device_train_batch_size=config.batch)
trainer = Trainer(AutoModelForCausalLM.from_pretrained(config.model), args, train_dataset=cut(config.max_length))
trainer.train()
"""
    (tmp_path / "own.yaml").write_text("batch: 8\nmax_length: 32\n")
    file = script(tmp_path, text)
    found = read_run(file, tmp_path / "own.yaml")
    assert (found.says, found.model, found.request.micro_batch) == ("arguments of a Trainer", "gpt2", 8)
    assert found.request.precision == "bf16-autocast"
    assert any("is given with it, which the script parses" in note for note in found.notes)
    with pytest.raises(UsageError, match=r"per_device_train_batch_size = config\.batch"):
        read_run(file)


def test_one_of_several_trainings(tmp_path: Path) -> None:
    second = """
    dpo_args = DPOConfig(per_device_train_batch_size=3, max_length=512)
    second = DPOTrainer(model=trainer.model, args=dpo_args)
    second.train()
"""
    path = script(tmp_path, SFT, "train.py", ("    trainer.train()\n", f"    trainer.train(){second}"))
    with pytest.raises(UsageError, match=r"2 configurations: args \(line 32, SFTTrainer\), dpo_args \(line 35, DPOTr"):
        read_run(path)
    for name in ("args", "trainer", "32"):
        assert given(read_run(f"{path}:{name}")) == given(read_run(script(tmp_path, SFT, "one.py")))
    own = given(read_run(f"{path}:dpo_args"))
    assert (own["loss"], own["reference"], own["micro_batch"], own["seq"]) == ("dpo", "base", 6, 512)
    with pytest.raises(UsageError, match="no configuration 'other'; expected one of args, dpo_args"):
        read_run(f"{path}:other")


def test_a_plan_is_written_into_a_script(tmp_path: Path, capsys: Any) -> None:
    path = script(tmp_path, SFT)
    command = ["plan", "--from", str(path), "--gpu", "h100-80gb", "--write", "--force"]
    written = tmp_path / "train.planned.py"
    assert run(command) == 0
    pairs = zip(SFT.splitlines(), written.read_text().splitlines(), strict=True)
    assert [new.strip() for old, new in pairs if old != new] == ["gradient_checkpointing=False,"]
    script(tmp_path, SFT, "train.py", ("        gradient_checkpointing=True,\n", ""))
    assert run(command) == 0
    assert "        gradient_checkpointing=False,\n        output_dir=" in written.read_text()
    ast.parse(written.read_text())
    capsys.readouterr()


COMMANDS = """
CUDA_VISIBLE_DEVICES=0,1 torchrun sft.py --model_name_or_path gpt2 --max_length 1024 --per_device_train_batch_size 2
deepspeed --include host:0,1,2 dpo.py --model_name_or_path gpt2 --max_length 512 --per_device_train_batch_size 1 --bf16
"""


def test_one_of_several_commands_and_their_gpus(tmp_path: Path) -> None:
    path = script(tmp_path, COMMANDS, "run.sh")
    found = read_run(path)
    assert (given(found)["loss"], found.gpus) == ("dpo", 3)
    assert any("dpo.py; FILE.sh:NAME reads another of sft.py, dpo.py" in note for note in found.notes)
    for name in ("sft.py", "1"):
        found = read_run(f"{path}:{name}")
        assert (given(found)["loss"], found.gpus) == ("tiled", 2)
    with pytest.raises(UsageError, match=r"no command 'kto'; expected one of sft\.py, dpo\.py"):
        read_run(f"{path}:kto")


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("deepspeed --num_gpus=4 t.py", 4),
        ("deepspeed --include a:0,1@b:2 t.py", 3),
        ("deepspeed --include a@b:2 t.py", 1),
        ("CUDA_VISIBLE_DEVICES=3,4,5 accelerate launch t.py", 3),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 1 t.py", 1),
        ("export CUDA_VISIBLE_DEVICES=0,1\ntorchrun t.py", 2),
        ("CUDA_VISIBLE_DEVICES=0,1 python t.py", 1),
        ("CUDA_VISIBLE_DEVICES=$1 torchrun t.py", 1),
    ],
)
def test_numbers_of_gpus_of_launchers(tmp_path: Path, command: str, gpus: int) -> None:
    more = " --model_name_or_path gpt2 --max_length 64 --per_device_train_batch_size 1\n"
    assert read_run(script(tmp_path, command + more, "run.sh")).gpus == gpus


@pytest.mark.parametrize(
    ("program", "arguments", "why"),
    [
        ("lora = LoraConfig(r=8)\nTrainer(model, TrainingArguments(), peft_config=lora)", "", "calls LoraConfig"),
        ("q = BitsAndBytesConfig(load_in_4bit=True)\nTrainer(load(q), None)", "", "calls BitsAndBytesConfig"),
        ("Trainer(model, None)", "--lora_dim 16", "another script may: give --lora"),
    ],
)
def test_adapters_that_a_program_makes(tmp_path: Path, program: str, arguments: str, why: str) -> None:
    (tmp_path / "own.py").write_text(program)
    run_sh = script(tmp_path, f"python own.py --model_name_or_path gpt2 --block_size 64 {arguments}", "run.sh")
    with pytest.raises(UsageError, match=why):
        read_run(run_sh)
    assert read_run(run_sh, asked={"lora": "r=8"}).request.lora == "r=8"
    own = "if options.tune:\n    lora = LoraConfig()\n    print(lora)\nTrainer(model, None)\n"
    (tmp_path / "own.py").write_text(own)
    run_sh = script(tmp_path, "python own.py --model_name_or_path gpt2 --block_size 64", "run.sh")
    assert any("may call LoraConfig" in note for note in read_run(run_sh).notes)


def test_elements_of_an_array(tmp_path: Path) -> None:
    text = """
lengths=(64 "128" 256)
names=("gpt2"
    "org/other")
for i in "${!names[@]}"; do
    torchrun --nproc_per_node ${#lengths[@]} train.py --model_name_or_path ${names[$i]} \\
        --block_size ${lengths[1]} --seed ${x[0]}
done
"""
    found = read_run(script(tmp_path, text, "run.sh"))
    assert (found.model, found.request.seq, found.gpus) == ("gpt2", 128, 3)


@pytest.mark.parametrize("text", ["main()\nx = [" + "[" * 500 + "]" * 501, "a = b(a)\nf(a)\n" * 3000, "f(**{1: 2})\n"])
def test_odd_scripts_end_in_an_answer_or_a_message(tmp_path: Path, text: str) -> None:
    path = script(tmp_path, text)
    try:
        read_config_file(path)
    except UsageError as error:
        assert str(path) in str(error)


def test_a_model_placed_by_an_empty_key(tmp_path: Path) -> None:
    script = """
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", device_map={"": 0})
trainer = Trainer(model=model, args=TrainingArguments("out", per_device_train_batch_size=4))
trainer.train()
"""
    (tmp_path / "train.py").write_text(script)
    found = read_run(tmp_path / "train.py")
    assert (found.model, found.request.micro_batch) == ("llama2-7b", 4)


def test_arguments_of_a_trainer_by_position(tmp_path: Path) -> None:
    script = """
trainer = SFTTrainer("Qwen/Qwen2.5-0.5B", SFTConfig("out", max_length=2048), train_dataset=rows)
trainer.train()
"""
    (tmp_path / "train.py").write_text(script)
    found = read_run(tmp_path / "train.py")
    assert (found.model, found.request.seq) == ("qwen2.5-0.5b", 2048)


def test_a_trainer_that_generates_is_not_taken_for_dpo(tmp_path: Path) -> None:
    script = """
args = GRPOConfig(num_generations=8, max_prompt_length=256, max_completion_length=128)
trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", args=args)
trainer.train()
"""
    (tmp_path / "train.py").write_text(script)
    with pytest.raises(UsageError, match="generation and reward models during training are not modelled"):
        read_run(tmp_path / "train.py")
    request = read_run(tmp_path / "train.py", allow_unread=True).request
    assert (request.loss, request.seq) == ("tiled", 384)


def test_unsloths_pairs_have_the_length_of_their_trainer(tmp_path: Path) -> None:
    script = """
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-3-8b-bnb-4bit", max_seq_length=4096)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["q_proj"])
trainer = DPOTrainer(model=model, ref_model=None, args=DPOConfig(per_device_train_batch_size=1), max_length=1024)
trainer.train()
"""
    (tmp_path / "train.py").write_text(script)
    request = read_run(tmp_path / "train.py").request
    assert (request.seq, request.micro_batch, request.loss) == (1024, 2, "upcast")


def test_names_that_are_assigned_together(tmp_path: Path) -> None:
    together = "BATCH, LENGTH = 6, 768\nBATCH, LENGTH = LENGTH // 384, 128 * BATCH\n"
    where = ("trainer = DPOTrainer", f"{together}trainer = DPOTrainer")
    script = """
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-3-8b-bnb-4bit", max_seq_length=4096)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["q_proj"])
trainer = DPOTrainer(model=model, args=DPOConfig(per_device_train_batch_size=BATCH), max_length=LENGTH)
trainer.train()
"""
    (tmp_path / "train.py").write_text(script.replace(*where))
    request = read_run(tmp_path / "train.py").request
    assert (request.seq, request.micro_batch) == (768, 2 * 2)


@pytest.mark.parametrize(
    ("half", "more", "upcast"),
    [("bf16", "", "norms"), ("fp16", "", "all"), ("bf16", ', fsdp="full_shard auto_wrap"', None)],
)
def test_four_bits_under_trl_before_0_20(tmp_path: Path, half: str, more: str, upcast: str | None) -> None:
    """Its trainer prepares the base by itself; today's casts adapters to bf16 instead."""
    text = f"""
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", quantization_config=quantized)
args = TrainingArguments("out", per_device_train_batch_size=1, {half}=True, gradient_checkpointing=True{more})
trainer = SFTTrainer(model=model, args=args, LENGTH, peft_config=LoraConfig(r=8, target_modules=["q_proj"]))
trainer.train()
"""
    (tmp_path / "old.py").write_text(text.replace("LENGTH", "max_seq_length=512"))
    old = read_run(tmp_path / "old.py", gpus=2).request
    assert (old.kbit_upcast, old.precision, old.base) == (upcast, "bf16-autocast", "nf4-double")
    assert old.optimizer == "adamw-foreach"  # of transformers before 4.54
    (tmp_path / "new.py").write_text(text.replace("LENGTH, ", ""))
    new = read_run(tmp_path / "new.py", gpus=2)
    assert (new.request.kbit_upcast, new.request.precision) == (None, "bf16-pure")
    assert any("TRL before 0.27" in note for note in new.notes)


def test_paths_of_a_script_are_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    sizes = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 512}
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(sizes))
    for head, name in (
        ("import os\nROOT = os.path.dirname(os.path.abspath(__file__))\n", 'os.path.join(ROOT, "gpt2")'),
        ("from pathlib import Path\nROOT = Path(__file__).resolve().parent\n", 'str(ROOT / "gpt2")'),
    ):
        found = read_run(script(tmp_path, head + TRAINER, "train.py", ('"gpt2"', name)))
        assert found.spec().depth == 3


def test_a_training_in_a_branch(tmp_path: Path) -> None:
    """What surely runs if the training does is known; what its other branch calls is none of it."""
    args = "TrainingArguments('out', per_device_train_batch_size={}, bf16=True)"
    (tmp_path / "train.py").write_text(
        f"""
import sys
def first():
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    def cut(row):
        return tokenizer(row["text"], max_length=256)
    rows = data.map(cut)
    args = {args.format(3)}
    Trainer(model, args, train_dataset=rows).train()
def second():
    model = AutoModelForCausalLM.from_pretrained("gpt2", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    other = {args.format(5)}
    Trainer(model, other, peft_config=LoraConfig(r=8, target_modules=["c_attn"])).train()
if sys.argv[1] == "first":
    first()
else:
    second()
"""
    )
    one, other = (read_run(tmp_path / f"train.py:{name}").request for name in ("args", "other"))
    assert (one.seq, one.micro_batch, one.lora, one.base) == (256, 3, None, None)
    assert (other.seq, other.micro_batch, other.lora, other.base) == (None, 5, "r=8,targets=c_attn", "nf4")


@pytest.mark.parametrize("more", ["", "parser = argparse.ArgumentParser()\n", "lora = LoraConfig(r=8)\n"])
def test_a_loop_of_a_scripts_own_is_refused(tmp_path: Path, more: str) -> None:
    (tmp_path / "train.py").write_text(
        more
        + """
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B", torch_dtype="bfloat16")
model.train()
for batch in batches:
    model(**batch).loss.backward()
    optimizer.step()
"""
    )
    with pytest.raises(UsageError, match=r"not read: loop = true \(its loop is not read: give --micro-batch"):
        read_run(tmp_path / "train.py")


STEPS = """
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype="bfloat16")
lora = LoraConfig(r=8, target_modules="all-linear")
args = SFTConfig("out", max_length=512, per_device_train_batch_size=BATCH)
trainer = SFTTrainer(model=model, args=args, peft_config=lora)
trainer.train()
"""
INSIDE = "    " + STEPS.strip().replace("\n", "\n    ")


@pytest.mark.parametrize(
    "text",
    [
        "def size():\n    if large():\n        return 2\n    return 4\nBATCH = size()" + STEPS,
        f"def train(BATCH=4):\n    if large():\n        BATCH = 8\n{INSIDE}\ntrain()",
        f"def train(BATCH):\n{INSIDE}\ntrain(2)\ntrain(8)",
        f"def train(BATCH=4):\n{INSIDE}\ntrain(**settings())",
        f"def train(name, BATCH=4):\n{INSIDE}\ntrain(*sys.argv)",
        f"class Run:\n  def train(self, BATCH=4):\n{INSIDE}\nRun().train(8)",
        "try:\n    BATCH = int(line())\nexcept ValueError:\n    BATCH = 4" + STEPS,
        "BATCH = 4\ndef larger():\n    global BATCH\n    BATCH = 8" + STEPS,
        "sizes = {'a': 4}\nif large():\n    sizes['a'] = 8\nBATCH = sizes['a']" + STEPS,
        "BATCH = 2\nother = BATCH = 4" + STEPS,
        "sizes = [4]\nsizes.insert(0, 8)\nBATCH = sizes[0]" + STEPS,
        "parser.add_argument('--batch', default=4)\no = parser.parse_args()\no.batch = o.batch // 2\nBATCH = o.batch"
        + STEPS,
        "parser.add_argument('--batch', default=4)\nBATCH = yaml.load(file).batch" + STEPS,
        STEPS.replace("per_device_train_batch_size=BATCH", "**load(file)"),
    ],
)
def test_a_value_that_may_be_another_one_is_unknown(tmp_path: Path, text: str) -> None:
    (unread,) = read_run(script(tmp_path, text), allow_unread=True).unread
    assert unread.name in ("SFTConfig().per_device_train_batch_size", "SFTConfig().**load(file)")


@pytest.mark.parametrize(
    "text",
    [
        "sizes = {'a': 2}\nsizes['a'] = 4\nBATCH = sizes['a']" + STEPS,
        "parser.add_argument('--batch', '--rows', default=4)\nBATCH = parser.parse_args().batch" + STEPS,
        "BATCH = int(os.environ.get('BATCH', 4))" + STEPS,
        f"def train(BATCH=2):\n{INSIDE}\ntrain(4)",
        STEPS.replace("per_device_train_batch_size=BATCH", "**dict(per_device_train_batch_size=4)"),
    ],
)
def test_a_value_that_is_sure(tmp_path: Path, text: str) -> None:
    found = read_run(script(tmp_path, "import os\n" + text))
    assert given(found)["micro_batch"] == 4
    noted = any("command line and environment have their defaults: " in note for note in found.notes)
    assert noted == ("environ" in text or "parser" in text)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("lora =", "model = PeftModel.from_pretrained(model, 'adapters')\n#", "adapters are not read: give --lora"),
        ("AutoModel", "AutoPeftModel", ""),
        ("CausalLM", "SequenceClassification", "a classification head is not read"),
        ("args = SFTConfig(", "args = HfArgumentParser(SFTConfig).parse() #", "it reads a command line"),
        ("args =", "if large():\n    model.gradient_checkpointing_enable()\nargs =", ""),
    ],
)
def test_what_a_script_does_in_addition_to_its_arguments(tmp_path: Path, old: str, new: str, why: str) -> None:
    text = STEPS.replace("BATCH", "4, gradient_checkpointing=False")
    if not why:
        assert given(read_run(script(tmp_path, text)))["recompute"] == "none"
    path = script(tmp_path, text.replace(", peft_config=lora", ""), "train.py", (old, new))
    if "Peft" in new:
        assert given(read_run(path, model="gpt2", asked={"lora": "r=4,targets=all-linear"}))["lora"][:3] == "r=4"
    with pytest.raises(UsageError, match=why or "not a literal|give --lora"):
        read_run(path)


def test_objects_that_nothing_uses(tmp_path: Path) -> None:
    text = STEPS.replace("BATCH", "4")
    bits = "bits = BitsAndBytesConfig(load_in_4bit=True)"
    own = given(read_run(script(tmp_path, bits + text)))
    assert own["lora"].startswith("r=8") and "base" not in own
    for unused in ("", ", peft_config=lora if LARGE else None"):
        changed = "LARGE = False" + text.replace(", peft_config=lora", unused)
        assert "lora" not in given(read_run(script(tmp_path, changed)))


def test_a_reference_that_is_given_is_kept_beside_adapters(tmp_path: Path) -> None:
    text = STEPS.replace("BATCH", "4").replace("SFT", "DPO")
    assert given(read_run(script(tmp_path, text)))["reference"] == "base"
    reference = 'ref_model=AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B", dtype="bfloat16"), args'
    assert given(read_run(script(tmp_path, text.replace("args=args", f"{reference}=args"))))["reference"] == "same"


def test_arguments_of_a_trainer_under_unsloth(tmp_path: Path) -> None:
    assert given(read_run(script(tmp_path, UNSLOTH, "train.py", ("optim", "max_seq_length=512, optim"))))["seq"] == 512
    assert (
        given(read_run(script(tmp_path, UNSLOTH, "train.py", ("optim", "max_seq_length=4096, optim"))))["seq"] == 1024
    )
    off = read_run(script(tmp_path, UNSLOTH, "train.py", ("optim", "gradient_checkpointing=False, optim")))
    assert (given(off)["recompute"], given(off)["offload"]) == ("none", False)
    with pytest.raises(UsageError, match="adapters of only some layers"):
        read_run(script(tmp_path, UNSLOTH, "train.py", ("r=32", "layers_to_transform=[0, 1], r=32")))


def test_a_call_of_several_on_a_line_is_changed(tmp_path: Path, capsys: Any) -> None:
    line = 'SFTTrainer(model="gpt2", args=SFTConfig(gradient_checkpointing=True, max_length=64)).train()\n'
    path = script(tmp_path, line)
    assert run(["plan", "--from", str(path), "--gpu", "h100-80gb", "--write", "--force"]) == 0
    assert (tmp_path / "train.planned.py").read_text() == line.replace("=True", "=False")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "for p in model.parameters():\n    p.requires_grad = False",
            r"requires_grad = line \d+ \(parameters frozen by hand",
        ),
        ("model.wte.requires_grad_(False)", r"requires_grad = line \d+ \(parameters frozen by hand"),
        ("model.wte.requires_grad_(requires_grad=False)", r"requires_grad = line \d+ \(parameters frozen by hand"),
        (
            "for name, p in model.named_parameters():\n    p.requires_grad = 'wte' in name",
            r"requires_grad = line \d+ \(parameters frozen by hand",
        ),
        ("model.to('cuda').to(torch.bfloat16)", r"model\.to\('cuda'\)\.bfloat16 = line \d+ \(weights that the script"),
        (
            "model = AutoModelForCausalLM.from_pretrained('gpt2').to(torch.bfloat16)",
            r"from_pretrained\('gpt2'\)\.bfloat16 = line \d+ \(weights that the script casts",
        ),
        ("apply_liger_kernel_to_llama()", r"apply_liger_kernel_to_llama = line \d+ \(.*: give --kernels\)"),
        ("def compute_loss(self, model, inputs): ...", r"compute_loss = line \d+ \(a loss of the script's own"),
        ("model = model.to('cuda', torch.bfloat16)", r"model\.bfloat16 = line \d+ \(weights that the script casts"),
        ("model.half()", r"model\.half = line \d+ \(weights that the script casts"),
        ("if fast():\n    model = torch.compile(model)", r"torch\.compile = torch\.compile \(line \d+: its value"),
    ],
)
def test_changes_of_a_step_that_are_no_arguments(tmp_path: Path, line: str, why: str) -> None:
    text = STEPS.replace("BATCH", "4").replace(", peft_config=lora", "").replace("lora =", "unused =")
    assert read_run(script(tmp_path, text)).compile is False
    harmless = "model.to('cuda'), model.requires_grad_(True)"
    assert read_run(script(tmp_path, text, "train.py", ("args =", f"{harmless}\nargs ="))).compile is False
    with pytest.raises(UsageError, match=why):
        read_run(script(tmp_path, text, "train.py", ("args =", f"import torch\n{line}\nargs =")))


def test_a_compiled_model_and_weights_frozen_under_adapters(tmp_path: Path) -> None:
    text = STEPS.replace("BATCH", "4")
    lines = (
        "import torch\nfor p in model.parameters():\n    p.requires_grad = False\nmodel = torch.compile(model)\nargs ="
    )
    found = read_run(script(tmp_path, text, "train.py", ("args =", lines)))
    assert found.compile
    assert found.request.lora
    assert read_run(script(tmp_path, text, "train.py", ("args =", "model.model.compile()\nargs ="))).compile


def test_cells_of_a_notebook_are_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# args = SFTConfig(max_length=1)"]},
        {"cell_type": "code", "source": ["%%bash\n", "args = 1 | 2"]},
        {"cell_type": "code", "source": ["%%capture\n", "!pip install \\\n", "    trl\n", "if True:\n", "    !ls\n"]},
        {"cell_type": "code", "source": ["assert (\n", "    1\n", "    != 2\n", "    % 3\n", ")\n"]},
        {"cell_type": "code", "source": STEPS.replace("BATCH", "4").splitlines(keepends=True)},
    ]
    path = script(tmp_path, json.dumps({"cells": cells}), "train.ipynb")
    assert given(read_run(path)) == given(read_run(script(tmp_path, STEPS.replace("BATCH", "4"))))
    with pytest.raises(UsageError, match="it is no notebook; expected JSON with cells"):
        read_run(script(tmp_path, "{}", "empty.ipynb"))
    before = path.read_text()
    assert run(["plan", "--from", str(path), "--gpu", "a100-40gb", "--write"]) != 0
    assert "alone as --from, a notebook as a script" in capsys.readouterr().err
    assert path.read_text() == before
