"""Type names for plain data: what YAML, JSON and checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]  # an experiment configuration or a section of it; read only
Values = dict[str, Any]  # values by name: a section under construction, a JSON object
Metrics = dict[str, Any]  # values by name
StateDict = dict[str, Any]  # the part of a checkpoint that one object saves
