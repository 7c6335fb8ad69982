"""The extra `train` of attention_jax: requires the folder train/ of a clone, or the same version from an index."""

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ExtrasHook(MetadataHookInterface):
  """Sets the extras: those of the section of this hook in pyproject.toml, and `train`."""

  def update(self, metadata: dict[str, Any]) -> None:
    if os.environ.get('ATTENTION_JAX_RELEASE') == '1':
      source = f'== {metadata["version"]}'
    else:
      source = f'@ {Path(self.root, "train").as_uri()}'
    metadata['optional-dependencies'] = self.config['extras'] | {'train': [f'attention_jax_train {source}']}
