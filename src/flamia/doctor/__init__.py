"""What this machine can run, what is missing, and whether attention computes here what it should.

`flamia doctor` prints it; `collect()` returns it as plain values, for a bug report or a job's log.
"""

from flamia.doctor.machine import collect
from flamia.doctor.packages import OPTIONAL_PACKAGES, OptionalPackage
from flamia.doctor.selftest import self_test

__all__ = ["OPTIONAL_PACKAGES", "OptionalPackage", "collect", "self_test"]
