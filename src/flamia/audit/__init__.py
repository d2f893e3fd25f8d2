"""Is an attention causal, does it keep documents apart, and how far is it from exact? Ours, torch's, or
yours.

>>> from flamia import audit
>>> report = audit.causality("mxfp8")            # or "torch-sdpa", "my_module:my_attention", a function
>>> report.verdict, report.worst("dq")
>>> audit.isolation("mxfp8").isolated
>>> audit.accuracy(["mxfp8", "nvfp4"], tokens=1024)

The commands `flamia audit` and `flamia accuracy` show the same as tables, as HTML or as JSON lines.
"""

from .accuracy import Accuracy, accuracy
from .causality import CausalityReport, Leak, causality
from .inputs import Sample, input_names, make_inputs
from .isolation import Crossing, IsolationReport, isolation
from .measures import Change, Distance, change, distance
from .targets import Result, Target, get_target, target_names

__all__ = [
    "Accuracy",
    "CausalityReport",
    "Change",
    "Crossing",
    "Distance",
    "IsolationReport",
    "Leak",
    "Result",
    "Sample",
    "Target",
    "accuracy",
    "causality",
    "change",
    "distance",
    "get_target",
    "input_names",
    "isolation",
    "make_inputs",
    "target_names",
]
