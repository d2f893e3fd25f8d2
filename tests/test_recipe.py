"""Recipes: what is refused and how the message says so, the presets, and a recipe as a value."""

import copy
import dataclasses
import json
import math
import pickle
import re

import pytest

import flamia
from flamia.recipe import Recipe, get_recipe, recipe_from_key, recipes

NAMES = {
    *("mxfp8", "nvfp4", "fp4", "mxfp8-folded", "nvfp4-folded", "mxfp8-paper"),
    *("mxfp8-exact", "nvfp4-exact", "fp4-exact", "mxfp8-folded-exact", "nvfp4-folded-exact"),
    *("leaky-per-tensor", "leaky-floor-1x32", "leaky-up-1x32", "leaky-fp4-keys"),
}
LEAKY = {n for n in NAMES if n.startswith("leaky")}

# ----------------------------------------------------------------------------------------------------- refusals

CHOICES = {
    "format": ("mxfp8", "nvfp4", "fp4"),
    "variant": ("block", "folded"),
    "row_sum": ("codes", "weights"),
    "accumulator": ("fp16", "fp32"),
    "accumulator_scale": ("sequence", "causal"),
    "exponential": ("exact", "schraudolph", "mitchell"),
    "operand_scale": ("block", "tensor", "groups"),
    "scale_rounding": ("up", "floor"),
    "rotate": (None, True, False),
}


@pytest.mark.parametrize("value", ["other", "", "MXFP8", None, 1, ["mxfp8"]], ids=repr)
@pytest.mark.parametrize("name", [n for n in CHOICES if n != "rotate"])
def test_a_value_outside_of_its_choices_is_refused_with_the_choices(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not supported")) as error:
        Recipe(**{name: value})
    for allowed in CHOICES[name]:
        assert repr(allowed) in str(error.value)


@pytest.mark.parametrize("value", [1, 0, "yes", 1.0], ids=repr)
@pytest.mark.parametrize("name", ["rotate", "exact_operands", "exact_ds", "stochastic_rounding", "training"])
def test_switches_take_booleans_only(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} is not supported")) as error:
        Recipe(**{name: value})
    assert "True" in str(error.value)
    assert "False" in str(error.value)


@pytest.mark.parametrize("value", [-1, 9, 4.0, "4", None, True], ids=repr)
@pytest.mark.parametrize("format", CHOICES["format"])
def test_p_shift_outside_of_0_to_8_is_refused(format, value):
    with pytest.raises(ValueError, match=re.escape(f"p_shift={value!r} is not supported: it must be an integer from")):
        Recipe(format=format, p_shift=value)


@pytest.mark.parametrize("value", [-1, -0.001, math.inf, math.nan, "4", True], ids=repr)
@pytest.mark.parametrize("format", CHOICES["format"])
def test_tau_that_is_no_threshold_is_refused(format, value):
    with pytest.raises(ValueError, match=re.escape(f"tau={value!r} is not supported: it must be a number >= 0")):
        Recipe(format=format, tau=value)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize(("a", "tau"), [(5, 4), (4, 5), (8, 1), (8, 0.8074), (0, 8.8074), (4, 4.8074)])
def test_weights_that_would_saturate_are_refused(format, a, tau):
    with pytest.raises(ValueError, match=rf"p_shift \+ tau = {re.escape(str(a + tau))} is unsafe.*448.*8\.807"):
        Recipe(format=format, p_shift=a, tau=tau)
    assert 2.0 ** (a + tau) > 448


@pytest.mark.parametrize(("a", "tau"), [(4, 4), (8, 0), (8, 0.8073), (0, 8.8073), (4, 4.8073), (0, 0)])
def test_weights_that_just_fit_are_accepted(a, tau):
    recipe = Recipe(p_shift=a, tau=tau)
    assert 2.0 ** (recipe.p_shift + recipe.tau) <= 448


COMBINATIONS = [
    (dict(format="fp4", tau=4), r"tau=4 is not supported by format='fp4'.*must be 0"),
    (dict(format="fp4", variant="folded"), r"variant='folded' is not defined for format='fp4'.*use variant='block'"),
    (dict(products="hopper"), r"products='hopper' is not defined for variant='block'.*variant must be 'folded'"),
    (dict(variant="folded", operand_scale="tensor"), r"variant='folded' is not defined.*ablations"),
    (dict(variant="folded", operand_scale="groups"), r"variant='folded' is not defined.*ablations"),
    (dict(variant="folded", scale_rounding="floor"), r"variant='folded' is not defined.*ablations"),
    (dict(format="fp4", exact_ds=False), r"exact_ds=False is not defined for format='fp4'"),
    (dict(format="fp4", operand_scale="tensor"), r"operand_scale='tensor' is not defined for format='fp4'"),
    (dict(format="fp4", operand_scale="groups"), r"operand_scale='groups' is not defined.*exact_operands=False"),
    (dict(format="fp4", scale_rounding="floor"), r"scale_rounding='floor' is not defined for format='fp4'"),
    (
        dict(format="fp4", exact_operands=False, scale_rounding="floor"),
        r"scale_rounding='floor' is not defined for format='fp4'.*scale_rounding='up'",
    ),
    (dict(exact_operands=True, operand_scale="tensor"), r"exact_operands=True contradicts operand_scale='tensor'"),
    (dict(exact_operands=True, operand_scale="groups"), r"exact_operands=True contradicts operand_scale='groups'"),
    (dict(exact_operands=True, scale_rounding="floor"), r"exact_operands=True needs scale_rounding='up'"),
    (dict(exponential="mitchell", training=False), r"exponential='mitchell' is not defined for format='mxfp8'.*fp4"),
    (dict(format="nvfp4", exponential="mitchell", training=False), r"exponential='mitchell' .* format='nvfp4'"),
    (dict(format="fp4", exponential="schraudolph", training=False), r"exponential='schraudolph' .* format='fp4'"),
    (dict(exponential="schraudolph"), r"exponential='schraudolph' is for inference.*training=False"),
    (dict(format="fp4", exponential="mitchell"), r"exponential='mitchell' is for inference.*training=False"),
]


@pytest.mark.parametrize(
    ("options", "message"), COMBINATIONS, ids=["-".join(map(str, options.values())) for options, _ in COMBINATIONS]
)
def test_combination_is_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**options)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "0", None, True], ids=repr)
def test_seed_outside_of_32_bits_is_refused(seed):
    with pytest.raises(ValueError, match=re.escape(f"seed={seed!r} is not supported: it must be an integer in [0, 2^")):
        Recipe(seed=seed)


@pytest.mark.parametrize(
    "options",
    [
        dict(exponential="schraudolph", training=False),
        dict(format="nvfp4", exponential="schraudolph", training=False),
        dict(format="fp4", exponential="mitchell", training=False),
        dict(format="fp4", tau=0),
        dict(variant="folded", exact_operands=True, exact_ds=True, accumulator_scale="causal"),
        dict(seed=2**32 - 1),
        dict(operand_scale="tensor", scale_rounding="floor"),
        dict(accumulator="fp32", row_sum="weights", rotate=True),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_combination_is_accepted_as_given(options):
    recipe = Recipe(**options)
    assert {name: getattr(recipe, name) for name in options} == options


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="rounding"):
        Recipe(rounding="up")


# ------------------------------------------------------------------------------------------- defaults and presets


@pytest.mark.parametrize("format", CHOICES["format"])
def test_defaults_of_each_format(format):
    recipe = Recipe(format=format)
    fp4 = format == "fp4"
    assert recipe.p_shift == 4
    assert recipe.tau == (0 if fp4 else 4)
    assert recipe.exact_operands is fp4
    assert recipe.exact_ds is fp4
    assert (recipe.row_sum, recipe.accumulator, recipe.accumulator_scale) == ("codes", "fp16", "sequence")
    assert (recipe.operand_scale, recipe.scale_rounding, recipe.exponential) == ("block", "up", "exact")
    assert recipe.training is True
    assert recipe.stochastic_rounding is True


def test_names():
    assert set(recipes()) == NAMES
    assert len(recipes()) == len(NAMES)
    assert flamia.recipes() == recipes()
    assert flamia.Recipe is Recipe
    assert get_recipe("mxfp8") == Recipe()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_preset(name):
    recipe = get_recipe(name)
    assert get_recipe(name) is recipe
    assert get_recipe(recipe) is recipe
    assert recipe.is_ablation is (name in LEAKY)
    assert recipe.training
    base = name.removesuffix("-exact")
    if name in LEAKY:
        return
    assert recipe.format == base.split("-")[0]
    assert recipe.variant == ("folded" if "folded" in base else "block")
    assert recipe.row_sum == ("weights" if base == "mxfp8-paper" else "codes")
    if name.endswith("-exact"):
        assert recipe == get_recipe(base).exact()
        assert recipe != get_recipe(base)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("leaky-per-tensor", dict(operand_scale="tensor")),
        ("leaky-floor-1x32", dict(operand_scale="groups", scale_rounding="floor", exact_ds=True)),
        ("leaky-up-1x32", dict(operand_scale="groups", exact_ds=True)),
        ("leaky-fp4-keys", dict(format="fp4", exact_operands=False)),
        ("mxfp8-paper", dict(row_sum="weights")),
    ],
)
def test_named_variation(name, options):
    assert get_recipe(name) == Recipe(**options)


def test_distinct_names_are_distinct_recipes():
    assert len({get_recipe(name) for name in NAMES}) == len(NAMES)
    assert len({get_recipe(name).key for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", ["mxfp9", "MXFP8", "", "exact"])
def test_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=re.escape(f"recipe={name!r} is unknown")) as error:
        get_recipe(name)
    for known in NAMES:
        assert known in str(error.value)


@pytest.mark.parametrize("value", [None, 3, {"format": "mxfp8"}, Recipe], ids=["None", "int", "dict", "class"])
def test_something_else_is_no_recipe(value):
    with pytest.raises(TypeError, match=rf"recipe must be a name or a flamia.Recipe, got {type(value).__name__}"):
        get_recipe(value)


@pytest.mark.parametrize("name", sorted(NAMES - LEAKY))
def test_exact_sets_the_three_options_and_nothing_else(name):
    recipe = dataclasses.replace(get_recipe(name), p_shift=3, seed=5, rotate=False)
    exact = recipe.exact()
    assert (exact.exact_operands, exact.exact_ds, exact.accumulator_scale) == (True, True, "causal")
    changed = {"exact_operands", "exact_ds", "accumulator_scale", "key"}
    for field in dataclasses.fields(Recipe):
        if field.name not in changed:
            assert getattr(exact, field.name) == getattr(recipe, field.name)
    assert exact.exact() == exact


@pytest.mark.parametrize("name", sorted(LEAKY - {"leaky-fp4-keys"}))
def test_exact_of_a_leaking_scheme_is_refused(name):
    with pytest.raises(ValueError, match="exact_operands=True contradicts operand_scale"):
        get_recipe(name).exact()


def test_exact_of_4_bit_groups_of_keys_is_the_method():
    assert get_recipe("leaky-fp4-keys").exact() == get_recipe("fp4-exact")


@pytest.mark.parametrize(
    ("options", "ablation"),
    [
        (dict(operand_scale="tensor"), True),
        (dict(scale_rounding="floor"), True),
        (dict(format="nvfp4", operand_scale="groups"), True),
        (dict(format="fp4", exact_operands=False), True),
        (dict(), False),
        (dict(exact_operands=False), False),
        (dict(format="fp4"), False),
        (dict(row_sum="weights"), False),
    ],
    ids=lambda x: "-".join(map(str, x.values())) or "default" if isinstance(x, dict) else str(x),
)
def test_is_ablation(options, ablation):
    assert Recipe(**options).is_ablation is ablation


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("format", CHOICES["format"])
def test_rotation_is_on_at_128_where_the_scores_have_8_bits_or_nvfp4(format, head_dim):
    assert Recipe(format=format).rotates(head_dim) is (head_dim == 128 and format != "fp4")
    assert Recipe(format=format, rotate=True).rotates(head_dim) is True
    assert Recipe(format=format, rotate=False).rotates(head_dim) is False


# ------------------------------------------------------------------------------------------------ as a value


@pytest.mark.parametrize("name", sorted(NAMES))
def test_key_round_trip(name):
    recipe = get_recipe(name)
    again = recipe_from_key(recipe.key)
    assert again == recipe
    assert again.key == recipe.key
    assert hash(again) == hash(recipe)
    assert set(json.loads(recipe.key)) == {f.name for f in dataclasses.fields(Recipe)} - {"key"}


def test_key_tells_every_option_apart():
    other = dict(
        format="nvfp4", variant="folded", rotate=True, p_shift=3, tau=1.5, row_sum="weights", exact_operands=True,
        exact_ds=True, accumulator="fp32", accumulator_scale="causal", stochastic_rounding=False, seed=7,
        training=False, operand_scale="tensor", scale_rounding="floor",
    )  # fmt: skip
    changed = [Recipe(), Recipe(exponential="schraudolph", training=False)]
    changed += [Recipe(**{name: value}) for name, value in other.items()]
    changed += [Recipe(variant="folded", products="hopper")]
    assert set(other) | {"exponential", "products", "key"} == {f.name for f in dataclasses.fields(Recipe)}
    assert len({r.key for r in changed}) == len(changed)
    assert len(set(changed)) == len(changed)
    for recipe in changed:
        assert recipe_from_key(recipe.key) == recipe


def test_equal_recipes_have_equal_keys_and_hashes():
    same = [Recipe(), Recipe(tau=4), Recipe(tau=4.0), Recipe(exact_operands=False, exact_ds=False), Recipe(seed=0)]
    assert len(set(same)) == 1
    assert len({r.key for r in same}) == 1
    assert Recipe(format="fp4") == Recipe(format="fp4", tau=0, exact_operands=True, exact_ds=True)


def test_recipe_is_frozen():
    recipe = Recipe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.tau = 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        del recipe.format
    with pytest.raises((TypeError, ValueError), match="key"):
        Recipe(key="{}")


def test_recipe_is_validated_when_replaced():
    with pytest.raises(ValueError, match="unsafe"):
        dataclasses.replace(Recipe(), p_shift=8)


@pytest.mark.parametrize("name", ["mxfp8", "fp4-exact", "leaky-up-1x32"])
def test_recipe_survives_copies(name):
    recipe = get_recipe(name)
    for again in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe)), eval(repr(recipe), {"Recipe": Recipe})):
        assert again == recipe
        assert again.key == recipe.key
