"""Puts the device side together: mesh, KV cache size, programs, weights, device state.

The order makes start-up short. Everything that programs need is known from shapes, so they compile in threads while
the weights load; the engine is ready when the weights are, and the first step waits for its own two programs only.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.config import EngineConfig
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.executor.base import Progress
from jaxpaged.kv_cache_spec import KVCacheConfig, blocks_for_tokens, group_layers
from jaxpaged.layers.attention import AttentionContext, kv_shapes
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.params.checkpoint import load_params
from jaxpaged.params.dummy import init_dummy_params
from jaxpaged.params.sharding import param_shapes
from jaxpaged.sampling.custom import load_processors
from jaxpaged.sampling.rows import SamplingRows
from jaxpaged.sampling.state import abstract_state, load_row, load_tokens
from jaxpaged.worker.buckets import MIN_BUCKET, doubling_buckets
from jaxpaged.worker.kv_blocks import Demand, size_kv_cache
from jaxpaged.worker.model_runner import DeviceState, ModelRunner
from jaxpaged.worker.packed import StepLayout, step_layout
from jaxpaged.worker.programs import CompileCounter, ProgramKey, Programs, enable_compilation_cache
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.step import Shapes, StepFunctions
