"""Names of plain data: what YAML, JSON and checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]  # of an experiment, or a section of it, which nobody changes
Values = dict[str, Any]  # by name: a section that is being made, or an object of JSON
Metrics = dict[str, Any]  # by name
StateDict = dict[str, Any]  # what a part of a training has in a checkpoint
