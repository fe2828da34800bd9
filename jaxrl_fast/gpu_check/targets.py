"""Describe GPUs to XLA, which then compiles for them on a machine without a GPU.

Numbers are those of NVIDIA's data sheets.
"""

import contextlib
import os
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from jaxrl_fast.utils import devices, target
from jaxrl_fast.utils.parsing import nearest

KIB, MB, GB = 2**10, 10**6, 10**9
PACKAGES = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")  # of the extra gpu-check


class GPU(NamedTuple):
    """A GPU by its data sheet."""

    name: str
    capability: tuple[int, int]  # CUDA's compute capability
    multiprocessors: int
    units: int  # float32 units of a multiprocessor
    threads: int  # of a multiprocessor
    shared: int  # bytes of shared memory of a multiprocessor
    cache: int  # bytes of the second cache
    memory: int  # bytes
    bandwidth: int  # bytes a second
    clock: float  # GHz


GPUS = {
    "t4": GPU("Tesla T4", (7, 5), 40, 64, 1024, 64 * KIB, 4096 * KIB, 15_800 * MB, 320 * GB, 1.59),
    "a100": GPU("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 2048, 164 * KIB, 40960 * KIB, 42 * GB, 1555 * GB, 1.41),
    "rtx4090": GPU("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 100 * KIB, 73728 * KIB, 25 * GB, 1008 * GB, 2.52),
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228 * KIB, 51200 * KIB, 84_900 * MB, 3352 * GB, 1.98),
    "h200": GPU("NVIDIA H200", (9, 0), 132, 128, 2048, 228 * KIB, 51200 * KIB, 150 * GB, 4800 * GB, 1.98),
}  # fmt: skip
PROTO = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: {gpu.shared}  shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {gpu.threads}  core_count: {gpu.multiprocessors}  fpus_per_core: {gpu.units}
  memory_bandwidth: {gpu.bandwidth}  l2_cache_size: {gpu.cache}  clock_rate_ghz: {gpu.clock}
  device_memory_size: {gpu.memory}  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{gpu.name}"
"""


class Cluster(NamedTuple):
    """GPUs of one kind on one host or several: 2x8xh200."""

    name: str
    num_hosts: int
    num_gpus: int | None  # of each host; None: as many as devices asks for

    @property
    def gpu(self) -> GPU:
        """Return the data sheet of each GPU."""
        return GPUS[self.name]


def read(text: str) -> Cluster:
    """Return the GPUs that a text names: "h200", or with the numbers of hosts and of each one's GPUs, "2x8xh200"."""
    *counts, name = text.split("x", 2)
    if len(counts) == 2 and all(count.isdecimal() and int(count) for count in counts):
        return Cluster(name, int(counts[0]), int(counts[1]))
    return Cluster(text, 1, None)


def check(text: str) -> None:
    """Raise ValueError for an unknown GPU, or without the packages that compile for it."""
    name = read(text).name
    if name not in GPUS:
        hint = nearest(name, GPUS) or f"; use {', '.join(GPUS)}"
        raise ValueError(f"for: must be the name of a GPU, got {text or 'nothing'}{hint}")
    for package in PACKAGES:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            remedy = 'pip install "jaxrl_fast[gpu-check]"'
            raise ValueError(f"for: requires the package {package}, got {text}; {remedy}") from None


def start() -> None:
    """Start JAX so that it compiles for GPUs that are not there. Call this before anything else imports it."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of CUDA's libraries, which only a run needs
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    with quiet():
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.local_devices()


@contextlib.contextmanager
def compiling_for(cluster: Cluster, num_devices: int = 1) -> Iterator[None]:
    """Trace and compile for GPUs within the context, `num_devices` of one host unless it has a number; see `target`."""
    from jax.experimental import topologies

    gpu = cluster.gpu
    proto = PROTO.format(gpu=gpu, optin=max(gpu.shared - 1024, 2**16))
    shape = f"1x{cluster.num_hosts}x{cluster.num_gpus or num_devices}"  # partitions, hosts, GPUs of each
    with quiet():
        found = topologies.get_topology_desc(platform="cuda", topology=shape, target_config=proto).devices
    memory = int(devices.DEFAULT_MEMORY_SHARE * gpu.memory)
    with target.tracing_for("gpu", target.Machine(gpu.name, tuple(found), memory)):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what libraries in C write to the standard error, such as that this machine has no GPU."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
