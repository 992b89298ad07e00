"""`calibrate`: figures, logs and snapshots of a run become an anchor, which corrects further answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jettison.cli.main import run
from jettison.core.units import GIB, MIB
from jettison.diagnose.fit_anchor import measured_in
from jettison.frameworks.run_file import run_from
from jettison.predict.time import estimate
from jettison.spec.anchor import MeasuredRun, read_anchor
from jettison.spec.hardware import hardware

RUN = ["llama3-8b", "--like", "torchtitan", "--dp", "8", "--seq", "4096", "--recompute", "full"]
ON = ["--gpu", "h100-80gb"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_anchored_estimate_is_slower_by_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = answer(capsys, "estimate", *RUN, *ON)
    anchor = str(tmp_path / "anchor.toml")
    figures = f"step={2 * before['step_seconds']}s"
    assert run(["calibrate", *RUN, *ON, "--measured", figures, "--out", anchor]) == 0
    said = capsys.readouterr()
    assert "--anchor" in said.err and "measured" in said.out
    again = answer(capsys, "estimate", *RUN, *ON, "--anchor", anchor)
    assert again["step_seconds"] == pytest.approx(2 * before["step_seconds"], rel=1e-3)
    assert run(["estimate", "llama3-8b", *ON, "--anchor", anchor]) == 0
    assert "note: the anchor is of a run of torchtitan, this one has no --like" in capsys.readouterr().err
    assert run(["calibrate", *RUN, "--measured", "allocated=1GiB"]) == 0
    assert "less than predicted, which nothing explains" in capsys.readouterr().err
    larger = [*RUN, "--micro-batch", "2", *ON]
    ratio = answer(capsys, "estimate", *larger, "--anchor", anchor)["step_seconds"]
    ratio /= answer(capsys, "estimate", *larger)["step_seconds"]
    assert 1.8 < ratio < 2.2
    assert answer(capsys, "plan", *RUN[:-2], *ON, "--anchor", anchor)["made_by"]["anchor"] == anchor
    assert run(["calibrate", *RUN, *ON, "--measured", figures, "--out", anchor]) == 2
    assert "is there already" in capsys.readouterr().err


def test_an_anchor_without_a_framework_says_nothing_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anchor, plain = str(tmp_path / "anchor.toml"), ["gpt2", "--seq", "512"]
    assert run(["calibrate", *plain, *ON, "--measured", "step=90s", "--out", anchor]) == 0
    assert "times what is predicted" in capsys.readouterr().err
    assert read_anchor(Path(anchor)).run == "jettison ledger gpt2 --seq 512"
    assert run(["estimate", *plain, *ON, "--anchor", anchor]) == 0
    assert "note: the anchor is" not in capsys.readouterr().err
    assert run(["estimate", *plain, "--gpu", "a100-80gb", "--anchor", anchor]) == 0
    assert "was measured on h100-80gb" in capsys.readouterr().err


def test_a_file_whose_layers_are_compiled_is_anchored_on_compiled_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same step by the command line, by Python, and once anchored."""
    file = str(Path(__file__).parents[2] / "examples" / "from" / "pretrain.toml")
    plain = answer(capsys, "estimate", "--from", file, "--gpus", "64", *ON)
    described = run_from(file, gpus=64)
    assert described.compiled
    assert estimate(described, hardware(ON[1])).step_seconds == plain["step_seconds"]
    anchor = str(tmp_path / "anchor.toml")
    given = ["--from", file, "--gpus", "64", *ON]
    assert run(["calibrate", *given, "--measured", "step=8s", "--out", anchor]) == 0
    capsys.readouterr()
    again = answer(capsys, "estimate", *given, "--anchor", anchor)
    assert again["step_seconds"] == pytest.approx(8.0, rel=1e-9)


def test_a_plan_names_its_anchor_from_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["calibrate", *RUN, *ON, "--measured", "step=9s", "--out", "anchor.toml"]) == 0
    capsys.readouterr()
    made = answer(capsys, "plan", *RUN[:-2], *ON, "--anchor", "anchor.toml")["made_by"]
    assert made["anchor"] == str((tmp_path / "anchor.toml").resolve())


def test_a_searched_step_is_anchored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anchor = str(tmp_path / "anchor.toml")
    assert run(["calibrate", *RUN, *ON, "--measured", "step=9s", "--out", anchor]) == 0
    capsys.readouterr()
    fixed = ["--tp", "1", "--pp", "1", "--cp", "1", "--zero", "3", "--micro-batch", "1", "--recompute", "full"]
    space = [RUN[0], "--like", "torchtitan", "--seq", "4096", "--gpus", "8", "--global-batch", "8", *fixed, *ON]
    found = answer(capsys, "search", *space, "--jobs", "1", "--anchor", anchor)["candidates"][0]
    assert found["step_seconds"] == pytest.approx(9, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt2", "--measured", "step=1s"], "give --gpu"),
        (["gpt2", "--measured", "nothing.log"], "or a log, snapshot or trace"),
        (["gpt2", "--measured", "peak=1GiB"], "expected some of"),
        (["a:b", "--measured", "step=1s"], "live model"),
        (["gpt2", "--recompute", "auto", "--measured", "allocated=1GiB"], "what the measured run recomputed"),
    ],
)
def test_what_cannot_be_anchored(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


LOGS = {
    "megatron": (
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.5 | max allocated: 2048.0 | reserved: 9 | max "
        "reserved: 4096.0\n iteration 1/9 | elapsed time per iteration (ms): 9000.0 | loss\n"
        + " iteration 2/9 | elapsed time per iteration (ms): 1500.0 | loss\n"
        * 3,
        MeasuredRun(allocated=2 * GIB, reserved=4 * GIB, step=1.5),
    ),
    "megatron, after the first step alone": (
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.5 | max allocated: 2048.0 | reserved: 9 | max "
        "reserved: 4096.0\n" + " iteration 2/9 | elapsed time per iteration (ms): 1500.0 | loss\n" * 3,
        MeasuredRun(step=1.5),
    ),
    "titan": (
        "[titan] \x1b[31mstep:  1  \x1b[33mmemory: 38.50GiB(48.6%)  \x1b[34mtps: 9  mfu: 1%\n"
        + "[titan] step: 10  memory: 40.00GiB(50.1%)  tps: 4,096  mfu: 41%\n" * 3,
        MeasuredRun(reserved=40 * GIB, step=2.0),
    ),
    "titan, older": (
        "[rank0]:step:  9  loss:  9.1  memory:  8.00GiB(8.42%)  wps: 4,096  mfu: 41.00%\n" * 3,
        MeasuredRun(reserved=8 * GIB, step=2.0),
    ),
    "automodel": (
        "step 9 | epoch 0 | loss 0.9 | lr 1.00e-05 | mem 45.25 GiB | tps 9000.00(4500.00/gpu) | num_label_tokens 9\n",
        MeasuredRun(allocated=int(45.25 * GIB)),
    ),
    "recipes": (
        "Max CUDA memory allocated was 42 GB\nMax CUDA memory reserved was 63 GB\n",
        MeasuredRun(allocated=42 * GIB, reserved=63 * GIB),
    ),
    "deepspeed": (
        "MA 1.0 GB         Max_MA 12.5 GB         CA 14.0 GB         Max_CA 16 GB\n",
        MeasuredRun(allocated=int(12.5 * GIB), reserved=16 * GIB),
    ),
    "deepspeed initializes": (  # ranks interleave; peaks of these lines are of no step, those of the last one are
        "[INFO] [utils.py:785:see_memory_usage] Before initializing optimizer states\nrank 1: loading\n"
        "[INFO] [utils.py:786:see_memory_usage] MA 9.0 GB     Max_MA 50.0 GB     CA 51.0 GB     Max_CA 51 GB\n"
        "After initializing ZeRO optimizer\nMA 9.0 GB         Max_MA 60.0 GB         CA 61.0 GB         Max_CA 61 GB \n"
        "After optimizer step\nMA 9.0 GB         Max_MA 20.0 GB         CA 22.0 GB         Max_CA 22 GB \n"
        "[INFO] [timer.py:264:stop] epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=2.5, "
        "CurrSamplesPerSec=8.0, MemAllocated=9.0GB, MaxMemAllocated=21.0GB\n",
        MeasuredRun(allocated=21 * GIB, reserved=22 * GIB, step=2.0),
    ),
    "deepspeed, rounded": (
        "MA 1.0 GB         Max_MA 16.4 GB         CA 14.0 GB         Max_CA 16 GB\n",
        MeasuredRun(allocated=round(16.4 * GIB)),
    ),
    "deepspeed only initializes": (
        "After initializing ZeRO optimizer\nMA 9.0 GB         Max_MA 60.0 GB         CA 61.0 GB         Max_CA 61 GB \n"
        "steps: 10 loss: 2.5 iter time (s): 1.500 samples/sec: 10.667\n",
        MeasuredRun(step=1.5),
    ),
    "nanotron": (
        "Memory usage: 1.0MiB. Peak allocated 512.00MiB. Peak reserved: 640.00MiB\n"
        "iteration: 3 / 9 | elapsed_time_per_iteration_ms: 1.25K | tokens_per_sec: 3K\n",
        MeasuredRun(allocated=512 * MIB, reserved=640 * MIB, step=1.25),
    ),
    "torchtune": (
        "Step 1 | loss:2 tokens_per_second_per_gpu:4096.0 peak_memory_alloc:8.0 peak_memory_reserved:10.0\n",
        MeasuredRun(allocated=8 * GIB, reserved=10 * GIB, step=2.0),
    ),
    "trainer": ("{'train_runtime': 100.0, 'train_steps_per_second': '0.5', 'epoch': 1.0}\n", MeasuredRun(step=2.0)),
    "trainer, slow": (  # 0.012 is 77 to 87 s; 16 sequences a step say which
        "{'train_runtime': 8000.0, 'train_samples_per_second': 0.2, 'train_steps_per_second': 0.012, 'epoch': 1.0}\n",
        MeasuredRun(step=80.0),
    ),
    "trainer, other batches": (
        "  train_samples_per_second =     64.0\n  train_steps_per_second   =      0.5\n",
        MeasuredRun(step=2.0),
    ),
    "trainer's JSON": ('{"epoch": 1.0, "train_steps_per_second": 0.25}\n', MeasuredRun(step=4.0)),
    "bridge": (
        "[Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 9.1 | mem-max-allocated-gigabytes: 41.5 "
        "| mem-max-reserved-gigabytes: 44.25\n",
        MeasuredRun(allocated=41_500_000_000, reserved=44_250_000_000),
    ),
    "seconds": ("iteration 9/ 99 | elapsed time per iteration (s): 12.5 | loss\n" * 3, MeasuredRun(step=12.5)),
    "nemo": ("iteration 9/99 | lr: 1e-4 | train_step_timing in s: 4.5 | consumed_samples: 80\n", MeasuredRun(step=4.5)),
    "litgpt": (
        "Epoch 1 | iter 8 step 4 | loss train: 1.9, val: n/a | iter time: 400.00 ms (step)\n"
        "| - Memory Used   : 21.5 GB\n",
        MeasuredRun(allocated=21_500_000_000, step=0.8),
    ),
    "litgpt's fine-tuning": ("| - Memory Used               :  10.45 GB    \n", MeasuredRun(allocated=10_450_000_000)),
    "nanogpt": (
        "step 0: train loss 9.1\niter 0: loss 9.1, time 9000.50ms, mfu -100.00%\n" * 2,
        MeasuredRun(step=9.0005),
    ),
    "nanochat": (
        "step 00009/00099 (9.09%) | loss: 3.1 | lrm: 1.00 | dt: 1500.00ms | tok/sec: 349,525 | mfu: 41.00\n"
        "Peak memory usage: 512.00MiB\n",
        MeasuredRun(allocated=512 * MIB, step=1.5),
    ),
    "liger": (
        "{'loss': 1.1, 'step_peak_memory_allocated_MB': 512.0, 'total_peak_memory_allocated_MB': 512.0, "
        "'step_peak_memory_reserved_MB': 640.0, 'step_tokens_per_second': 18801.85}\n",
        MeasuredRun(allocated=512 * MIB, reserved=640 * MIB),
    ),
    "axolotl": (
        "{'loss': 1.1, 'memory/max_active (GiB)': 9.5, 'memory/max_allocated (GiB)': 9.5, "
        "'memory/device_reserved (GiB)': 12.0}\n",
        MeasuredRun(allocated=int(9.5 * GIB), reserved=12 * GIB),
    ),
    "axolotl's summary": (
        "{'train_runtime': '80.0', 'train_steps_per_second': '0.5', 'memory/max_allocated (GiB)': '9.5'}\n"
        '{"memory/device_reserved (GiB)": 12.0}\n',
        MeasuredRun(allocated=int(9.5 * GIB), reserved=12 * GIB, step=2.0),
    ),
    "axolotl, older": (
        "[RANK:0] GPU memory usage while training: 10.000GB (+4.500GB cache, +1.500GB misc)\n",
        MeasuredRun(reserved=int(14.5 * GIB), device=16 * GIB),
    ),
    "unsloth": ("Peak reserved memory = 6.5 GB.\n", MeasuredRun(reserved=int(6.5 * GIB))),
    "nvidia-smi": (
        "| N/A   45C    P0   300W / 400W |  30720MiB / 81920MiB |     99%      Default |\n"
        "| N/A   45C    P0   300W / 400W |  40960MiB / 81920MiB |     99%      Default |\n",
        MeasuredRun(device=40 * GIB),
    ),
    "nvidia-smi before the run": (
        "| N/A   25C    P0    50W / 400W |      3MiB / 81920MiB |      0%      Default |\n"
        "| N/A   25C    P0    50W / 400W |   4096MiB / 81920MiB |      0%      Default |\n"
        "{'loss': 1.1, 'memory(GiB)': 60.5, 'train_speed(iter/s)': 0.25}\n",
        MeasuredRun(reserved=int(60.5 * GIB), step=4.0),
    ),
    "nvidia-smi with another job, and another rank's context": (
        "|   0  NVIDIA A100-SXM4-80GB          Off |   00000000:01:00.0 Off |                    0 |\n"
        "| N/A   45C    P0            300W /  400W |   46000MiB /  81920MiB |     99%      Default |\n"
        "|                                         |                        |             Disabled |\n"
        "|    0   N/A  N/A      2607      G   /usr/lib/xorg/Xorg                              4MiB |\n"
        "|    0   N/A  N/A     27183      C   VLLM::EngineCore                            20000MiB |\n"
        "|    0   N/A  N/A     36421      C   ...envs/a/bin/python                        24576MiB |\n"
        "|    0   N/A  N/A     36422      C   ...envs/a/bin/python                          738MiB |\n",
        MeasuredRun(device=24 * GIB),
    ),
    "nvidia-smi of instances (MIG)": (
        "| N/A   44C    P0            174W /  500W |   24259MiB /  40536MiB |     N/A      Default |\n"
        "|                                         |                        |              Enabled |\n"
        "+-----------------------------------------+------------------------+----------------------+\n"
        "|  1    3   0   0  |  14336MiB / 19968MiB | 28      0 |  2   0    1    0    0 |\n"
        "|                  |      4MiB / 32767MiB |           |                       |\n"
        "|  1    5   0   1  |   9880MiB / 19968MiB | 28      0 |  2   0    1    0    0 |\n",
        MeasuredRun(device=14 * GIB),
    ),
    "gpustat": (
        "[0] NVIDIA A100-SXM4-40GB | 35'C,  98 % | 10240 / 40960 MB | me(10232M)\n",
        MeasuredRun(device=10 * GIB),
    ),
    "memory summary": (
        "| Allocated memory      |    512 MiB |  10240 MiB |  66253 MiB |  65741 MiB |\n"
        "| GPU reserved memory   |  11264 MiB |  12288 MiB |  12288 MiB |   1024 MiB |\n",
        MeasuredRun(allocated=10 * GIB, reserved=12 * GIB),
    ),
    "xtuner 0": (
        "2024/05/07 12:41:21 - mmengine - INFO - Iter(train) [1530/2046]  lr: 3.1649e-05  eta: 0:28:29  time: 1.5  "
        "data_time: 0.0190  memory: 15360  loss: 0.7908\n",
        MeasuredRun(allocated=15 * GIB, step=3.0),
    ),
    "xtuner 1": (
        "Epoch 1 Step 9/99 data_time: 0.01 lr: 1.0e-05 time: 1.5000 text_tokens: 9 seqlen_tokens: 9 "
        "max_memory: 45.50 GB reserved_memory: 50.25 GB tgs: 99.0\n",
        MeasuredRun(allocated=int(45.5 * GIB), reserved=int(50.25 * GIB), step=1.5),
    ),
    "accelerate": (
        "CPU Total Peak Memory consumed during the train (max): 30000\n"
        "GPU Total Peak Memory consumed during the train (max): 10240\n",
        MeasuredRun(allocated=10 * GIB),
    ),
    "titan, zero is none": (
        "step: 3  loss: 4.9  memory:  0.00GiB(0.00%)  tps: 4,096  tflops: 3.15  mfu: 0.32%\n",
        MeasuredRun(step=2.0),
    ),
    "W&B of torchtitan": (
        '{"memory/max_reserved(GiB)":49.5,"memory/max_reserved(%)":52.2,"throughput(tps)":4096.0,"_step":250}\n',
        MeasuredRun(reserved=int(49.5 * GIB), step=2.0),
    ),
    "W&B of torchtune": (
        '{"tokens_per_second_per_gpu":4096.0,"peak_memory_alloc":8.0,"peak_memory_reserved":10.0}\n',
        MeasuredRun(allocated=8 * GIB, reserved=10 * GIB, step=2.0),
    ),
    "W&B of nanotron": ('{"elapsed_time_per_iteration_ms":1250.0,"_step":9}\n', MeasuredRun(step=1.25)),
    "W&B of Megatron": (
        '{"iteration-time":5.5,"mem-allocated-bytes":58250000000,"mem-max-allocated-bytes":61250000000}\n',
        MeasuredRun(allocated=61_250_000_000, step=5.5),
    ),
    "W&B of a Trainer, its rate rounded": (
        '{"train/global_step":8,"train_runtime":2292.0,"train_steps_per_second":0.003}\n',
        MeasuredRun(step=286.5),
    ),
    "trainer_state.json": (
        '      "step": 8,\n      "total_flos": 8.04e+16,\n      "train_loss": 0.2,\n      "train_runtime": 2292.0,\n'
        '      "train_steps_per_second": 0.003\n',
        MeasuredRun(step=286.5),
    ),
    "the second of two steps": (
        "steps: 1 loss: 12.6 iter time (s): 5.400 samples/sec: 47.411\n"
        "steps: 2 loss: 12.6 iter time (s): 2.673 samples/sec: 95.775\n",
        MeasuredRun(step=2.673),
    ),
    "swift": (
        "{'loss': 1.1, 'memory(GiB)': 60.5, 'train_speed(iter/s)': 0.25}\n",
        MeasuredRun(reserved=int(60.5 * GIB), step=4.0),
    ),
    "swift, means since the start": (
        "{'loss': 1.1, 'global_step/max_steps': '1/4', 'train_speed(s/it)': '8.0'}\n"
        "{'loss': 1.1, 'global_step/max_steps': '2/4', 'train_speed(s/it)': '5.0'}\n"
        "{'loss': 1.1, 'global_step/max_steps': '4/4', 'train_speed(s/it)': '3.5'}\n"
        "{'train_runtime': '15', 'global_step/max_steps': '4/4', 'train_speed(s/it)': '3.75'}\n",
        MeasuredRun(step=2.0),
    ),
    "swift, resumed": (
        "{'loss': 1.1, 'iteration': '101/104', 'train_speed(s/it)': 8.0}\n"
        "{'loss': 1.1, 'iteration': '102/104', 'train_speed(s/it)': 5.0}\n"
        "{'loss': 1.1, 'iteration': '104/104', 'train_speed(s/it)': 3.5}\n",
        MeasuredRun(step=3.5),
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_logs_of_trainers(tmp_path: Path, name: str) -> None:
    text, wanted = LOGS[name]
    file = tmp_path / ("all_results.json" if text.startswith("{") else "run.log")
    file.write_text(text)
    assert measured_in(file, tokens_per_device=8192, micro_batches=2, sequences=16) == wanted


def test_a_log_and_figures_are_the_same_anchor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "run.log"
    log.write_text(LOGS["megatron"][0].replace("2048.0", "40960.0").replace("4096.0", "45056.0"))
    files = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for file, measured in zip(files, (str(log), "allocated=40GiB reserved=44GiB step=1.5s"), strict=True):
        assert run(["calibrate", *RUN, *ON, "--measured", measured, "--out", str(file)]) == 0
    assert read_anchor(files[0]) == read_anchor(files[1])
    log.write_text("{'train_runtime': 2292.0, 'train_samples_per_second': 0.4, 'train_steps_per_second': 0.003}\n")
    assert run(["calibrate", *RUN, *ON, "--measured", str(log)]) == 2
    assert "no finer rate than 0.003 steps a second" in capsys.readouterr().err
    log.write_text("nothing of the kind\n")
    assert run(["calibrate", *RUN, *ON, "--measured", str(log)]) == 2
    assert "no line of a trainer" in capsys.readouterr().err
