"""Computes feature grids of images with a pretrained network, for captioners that read features instead of pictures.

  python -m experiments.features --images=FOLDER/images --network=microsoft/resnet-50 --output=FOLDER/features.npz
  python -m experiments.train --config=configs/flickr8k.py:xu2015_soft --workdir=runs/f --config.data.folder=FOLDER \\
    --config.data.task="captions(features='features.npz')" --config.model.encoder='precomputed(features=256)'

Needs the packages torch and transformers, which no other program of this folder needs.
"""

import sys

import rich.console
import rich.progress
from absl import flags

from experiments.launch import FLAGS, check_output_path, launch, require_flag

flags.DEFINE_string('images', None, 'a folder with images')
flags.DEFINE_string('network', None, 'an image network at Hugging Face, or the folder of a saved one')
flags.DEFINE_string('output', None, 'a new .npz file')
flags.DEFINE_integer(
  'size',
  None,
  'side in pixels to which the central square of an image is scaled; by default the input size of the network',
  1,
)
flags.DEFINE_integer('batch_size', 32, 'images per batch', 1)


def main() -> None:
  """Computes the features of --images by --network, and writes them to --output."""
  from attention_jax.systems.captioning.data import list_images
  from attention_jax.systems.captioning.features import load_pretrained, write_features

  folder = require_flag('images')
  network_name = require_flag('network')
  path = check_output_path(require_flag('output'), 'output')
  names = list_images(folder)
  network, training_size = load_pretrained(network_name)
  size = FLAGS.size or training_size
  with rich.progress.Progress(console=rich.console.Console(file=sys.stderr)) as progress:
    bar = progress.add_task('images', total=len(names))

    def on_batch(count: int) -> None:
      progress.advance(bar, count)

    shape = write_features(path, folder, names, network, size=size, batch=FLAGS.batch_size, on_batch=on_batch)
  print(f'written to {path}: grids of {" x ".join(map(str, shape))} for {len(names)} images')


if __name__ == '__main__':
  launch(main)
