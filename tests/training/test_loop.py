"""The loop: schedule, logs, checkpoints, and what stops it."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from flamia.training import PRESETS, TrainConfig, Trainer, learning_rate, run
from flamia.training.evaluation import MATERIAL


class Stop(Exception):
    """An interruption in the middle of a run."""


def interrupt_at(step):
    def progress(report):
        if report.step == step:
            raise Stop

    return progress


def log(folder):
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


def test_the_rate_rises_to_its_peak_and_falls_to_its_end(small):
    config = small(steps=100, warmup=10, lr=2.0, final_lr=0.1)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert all(a < b for a, b in itertools.pairwise(rates[:10]))
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[10 + 45] == pytest.approx(1.1, abs=0.05)


@pytest.mark.parametrize("warmup", [0, 5])
def test_short_runs_have_a_rate_too(small, warmup):
    for steps in (1, 2, 3):
        config = small(steps=steps, warmup=warmup)
        assert all(0 <= learning_rate(config, step) <= config.lr for step in range(steps))
        assert learning_rate(config, 0) > 0


@pytest.mark.parametrize("recipe", ["exact", "mxfp8"])
def test_the_loss_falls_on_real_text(small, recipe):
    result = run(small(recipe=recipe, steps=60, tokens=256, lr=1e-2))
    assert result.losses[0] == pytest.approx(math.log(257), abs=0.1)
    assert max(result.losses[-5:]) < 3.3
    assert result.final.exact < 3.4
    assert result.final.step == 60
    assert len(result.losses) == len(result.grad_norms) == 60
    assert result.tokens_per_s > 0


def test_a_seed_gives_one_run_and_reading_seldom_changes_nothing(small):
    runs = [run(small(log_every=every)) for every in (1, 3, 100)]
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].grad_norms == runs[2].grad_norms
    assert runs[0].final.own_rows == runs[2].final.own_rows
    assert run(small(seed=1)).losses != runs[0].losses


def test_autocast_changes_little_and_reaches_everything_but_attention(small):
    plain = run(small(recipe="mxfp8", steps=4))
    lowered = run(small(recipe="mxfp8", steps=4, autocast=True))
    assert lowered.losses != plain.losses
    # BF16 keeps 8 bits: losses near 5.5 move by less than a hundredth.
    assert lowered.losses == pytest.approx(plain.losses, abs=0.05)


def test_exact_attention_has_no_gap(small):
    final = run(small()).final
    assert final.gap == 0
    assert final.own == final.exact


@pytest.mark.parametrize("recipe", ["exact", "mxfp8", "fp4"])
def test_a_resumed_run_is_the_uninterrupted_one(small, tmp_path, recipe):
    arguments = dict(recipe=recipe, steps=9, checkpoint_every=4, log_every=1, eval_every=3)
    whole = Trainer(small(out=str(tmp_path / "whole"), **arguments))
    expected = whole.train()
    with pytest.raises(Stop):
        run(small(out=str(tmp_path / "cut"), **arguments), interrupt_at(7))
    resumed = Trainer(small(out=str(tmp_path / "cut"), resume=True, **arguments))
    assert resumed.step == 4
    result = resumed.train()
    assert result.first_step == 4
    assert result.losses == expected.losses[4:]
    assert result.grad_norms == expected.grad_norms[4:]
    assert result.final == expected.final
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)

    def timeless(folder):
        return [{key: value for key, value in entry.items() if key != "tokens_per_s"} for entry in log(folder)]

    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")


def test_a_finished_run_can_be_evaluated_again_and_lengthened(small, tmp_path):
    out = str(tmp_path / "run")
    first = run(small(out=out))
    again = run(small(out=out, resume=True))
    assert again.losses == []
    assert again.final == first.final
    longer = run(small(out=out, resume=True, steps=11))
    assert len(longer.losses) == 3
    with pytest.raises(ValueError, match=r"steps is 5.*step 11"):
        run(small(out=out, resume=True, steps=5))


def test_every_step_is_logged_once(small, tmp_path):
    result = run(small(out=str(tmp_path), eval_every=4, log_every=3))
    entries = log(tmp_path)
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 9))
    assert [entry["loss"] for entry in steps] == result.losses
    assert all(set(entry) == {"step", "loss", "lr", "grad_norm", "tokens_per_s"} for entry in steps)
    evaluations = [entry for entry in entries if "gap" in entry]
    assert [entry["step"] for entry in evaluations] == [4, 8]
    assert evaluations[-1]["validation_loss"] == result.final.own
    assert json.loads((tmp_path / "config.json").read_text())["preset"] == "tiny"
    assert json.loads((tmp_path / "result.json").read_text())["losses"] == result.losses


def test_progress_is_told_of_reads_and_evaluations(small):
    reports = []
    run(small(log_every=3, eval_every=4), reports.append)
    assert [report.step for report in reports] == [3, 4, 6, 8]
    assert [report.evaluation is not None for report in reports] == [False, True, False, True]
    assert all(report.steps == 8 and report.tokens_per_s > 0 for report in reports)


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(small, tmp_path):
    trainer = Trainer(small(out=str(tmp_path), checkpoint_every=1, log_every=1, steps=6))

    def poison(report):
        if report.step == 3:
            with torch.no_grad():
                trainer.model.head.weight[0, 0] = math.nan

    with pytest.raises(FloatingPointError, match=r"step 4 of recipe 'exact'.*nan"):
        trainer.train(poison)
    assert log(tmp_path)[-1]["step"] == 4
    assert log(tmp_path)[-1]["loss"] is None
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 3
    assert torch.isfinite(state["model"]["head.weight"]).all()


def test_a_folder_is_neither_overwritten_nor_mistaken(small, tmp_path):
    out = str(tmp_path / "run")
    with pytest.raises(ValueError, match=r"no checkpoint\.pt to resume from"):
        run(small(out=out, resume=True))
    run(small(out=out))
    with pytest.raises(ValueError, match="already holds a run"):
        run(small(out=out))
    with pytest.raises(ValueError, match="seed is 1, the checkpoint has 0"):
        run(small(out=out, resume=True, seed=1))
    with pytest.raises(ValueError, match="recipe is 'mxfp8', the checkpoint has 'exact'"):
        run(small(out=out, resume=True, recipe="mxfp8"))
    (tmp_path / "other.txt").write_text("another text, to be sure\n" * 20)
    with pytest.raises(ValueError, match="corpus is"):
        run(small(out=out, resume=True, data=(str(tmp_path / "other.txt"),)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "mxfp9"}, "recipe is 'mxfp9'; allowed: exact, bf16, mxfp8"),
        ({"steps": 0}, "steps is 0"),
        ({"lr": -1.0}, "lr is -1"),
        ({"beta2": 1.0}, "beta2 is 1"),
        ({"final_lr": 2.0}, "final_lr is 2"),
        ({"eval_every": -1}, "eval_every is -1"),
        ({"resume": True}, "resume is set but out is not"),
        ({"checkpoint_every": 5}, "checkpoint_every is set but out is not"),
        ({"learning_rate": 1}, "'learning_rate' is no field"),
    ],
)
def test_impossible_runs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.of("tiny", **changes)


def test_unknown_presets_and_devices_are_refused(small):
    with pytest.raises(ValueError, match="preset is 'huge'; allowed: tiny, paper, 1b, probe"):
        TrainConfig.of("huge")
    for device in ("tpu", "meta"):
        with pytest.raises(ValueError, match=f"device is '{device}'"):
            Trainer(small(device=device))
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=absent):
        Trainer(small(device=absent))


def test_presets_keep_what_is_not_changed():
    config = TrainConfig.of("probe", steps=3, lr=None)
    assert config.steps == 3
    assert config.lr == PRESETS["probe"].lr
    assert config.model.window == 2


@pytest.mark.matrix
def test_a_leaking_recipe_is_learned_and_a_causal_one_is_not():
    """The bar of the demo, on a shorter run of its preset and the default corpus."""
    leaky = run(TrainConfig.of("probe", recipe="leaky-fp4-keys", steps=300, device="cpu")).final
    assert leaky.gap < -MATERIAL
    assert leaky.gap < -4 * leaky.gap_standard_error
    causal = run(TrainConfig.of("probe", recipe="mxfp8", steps=300, device="cpu")).final
    exact = run(TrainConfig.of("probe", recipe="exact", steps=300, device="cpu")).final
    assert abs(causal.gap) < MATERIAL
    assert abs(causal.own - exact.own) < 0.02
