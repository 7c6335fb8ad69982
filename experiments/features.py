"""Grids of features of images by a pretrained network, for captioners that read them instead of the pictures.

  python -m experiments.features --images=FOLDER/images --network=microsoft/resnet-50 --output=FOLDER/features.npz
  python -m experiments.train --config=configs/flickr8k.py:xu2015_soft --workdir=runs/f --config.data.folder=FOLDER \\
    --config.data.task="captions(features='features.npz')" --config.model.encoder='precomputed(features=256)'

Needs the packages torch and transformers, which nothing else here does.
"""

import sys

import rich.console
import rich.progress
from absl import flags

from experiments.launch import FLAGS, check_output_path, launch, require_flag

flags.DEFINE_string('images', None, 'a folder with images')
flags.DEFINE_string('network', None, 'a network of images at Hugging Face, or the folder that one was saved to')
flags.DEFINE_string('output', None, 'an .npz file; it must not exist')
flags.DEFINE_integer('size', None, 'to which the middle square of images is scaled; by default as in its training', 1)
flags.DEFINE_integer('batch_size', 32, 'images at once', 1)


def main() -> None:
  from attention_jax.data.features import load_pretrained, write_features
  from attention_jax.data.pictures import list_images

  folder, name, path = (
    require_flag('images'),
    require_flag('network'),
    check_output_path(require_flag('output'), 'output'),
  )
  names = list_images(folder)
  network, trained = load_pretrained(name)
  size = FLAGS.size or trained
  with rich.progress.Progress(console=rich.console.Console(file=sys.stderr)) as progress:
    bar = progress.add_task('images', total=len(names))
    on_batch = lambda count: progress.advance(bar, count)
    shape = write_features(path, folder, names, network, size=size, batch=FLAGS.batch_size, on_batch=on_batch)
  print(f'written to {path}: grids of {" x ".join(map(str, shape))} for {len(names)} images')


if __name__ == '__main__':
  launch(main)
