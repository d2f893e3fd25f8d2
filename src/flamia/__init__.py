"""flamia: low-precision softmax attention that people train with.

Softmax attention, forward and backward, in microscaling formats on packed documents, after the FLAMIA paper.
"""

from flamia.attention import flash_attn_func, flash_attn_varlen_func, warmup
from flamia.operators import last_plan
from flamia.plan import Plan
from flamia.recipe import Recipe, get_recipe, recipes

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "Recipe",
    "__version__",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_recipe",
    "last_plan",
    "recipes",
    "warmup",
]
