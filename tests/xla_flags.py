"""Flags with which XLA compiles the small programs of the tests without optimisation. Imports no jax."""

from importlib.metadata import version

QUICK_FLAGS = (
  '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1'
)
if version('jaxlib') < '0.11':  # later versions have no other emitters and reject the flag
  QUICK_FLAGS += ' --xla_cpu_use_fusion_emitters=false'
