"""Exports a trained run of translation as functions and weights that need jax, flatbuffers, numpy and safetensors,
but not this package.

  python -m experiments.export --workdir=runs/dates --output=exported
  python -m experiments.export --workdir=runs/dates --output=exported --beams=1 --platforms=cpu,cuda,tpu
  python -m experiments.export --workdir=runs/pointer --output=exported --source_length=32
  python -m experiments.export --workdir=runs/transformer --output=marian --format=marian

Writes search, start and step (jax.export), the weights (safetensors) and the vocabularies; docs/interop.md shows how to
call them. The number of sources is free, and so is the number of source positions unless --source_length fixes it.
--format=marian writes the files of MarianMT instead, which transformers and experiments.import_model read.
"""

from pathlib import Path

from absl import flags

from attention_jax.atomic import write_folder_atomic
from attention_jax.errors import UserError, choose
from attention_jax.specs import MAX_REPEATS
from experiments.launch import FLAGS, MAX_LENGTH, check_output_folder, define_run_flags, launch, require_flag

PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')

FORMATS = ('functions', 'marian')
FUNCTION_FLAGS = ('beams', 'max_length', 'source_length', 'platforms')

define_run_flags()
flags.DEFINE_string('format', FORMATS[0], f'what is written, one of: {", ".join(FORMATS)}')
flags.DEFINE_string('output', None, 'a new folder')
flags.DEFINE_integer('beams', None, 'beam size, 1 for greedy search; by default as in the config', 1, MAX_REPEATS)
flags.DEFINE_integer('max_length', None, 'maximum tokens of an output; by default as in the config', 1, MAX_LENGTH)
flags.DEFINE_integer(
  'source_length', 0, 'number of positions of every source, padding included; 0 for any', 0, MAX_LENGTH
)
flags.DEFINE_list('platforms', ['cpu'], f'platforms on which the functions run, any of: {", ".join(PLATFORMS)}')


def main() -> None:
  """Exports the run of --workdir to the folder --output. Raises UserError for a model that cannot be exported."""
  from attention_jax.decoding.exporting import ExportRequest, export_decoder, write_export
  from attention_jax.systems import runs
  from attention_jax.systems.base import SupportsTranslation

  output = check_output_folder(require_flag('output'), 'output')
  if choose(FLAGS.format, FORMATS, 'format') == 'marian':
    write_marian(output)
    return
  if not FLAGS.platforms:
    raise UserError(f'--platforms is empty; expected any of: {", ".join(PLATFORMS)}')
  for platform in FLAGS.platforms:
    choose(platform, PLATFORMS, 'platform')
  run = runs.open_run(require_flag('workdir'), FLAGS.checkpoint, dtype=FLAGS.dtype)
  system = run.system_with(SupportsTranslation)
  predictor = run.predictor
  request = ExportRequest(
    FLAGS.max_length or predictor.max_length,
    FLAGS.beams or run.config.evaluation.beams,
    predictor.ranking,
    FLAGS.source_length,
    FLAGS.platforms,
    predictor.constraints,
  )
  try:
    exported = export_decoder(run.model, run.params, request)
  except UserError as error:
    raise UserError(f'{run.folder}: {error}') from error
  with write_folder_atomic(output) as folder:
    write_export(exported, run.params, folder)
    system.save(str(folder))
  print_written(output)


def write_marian(output: Path) -> None:
  """Writes the run of --workdir in the layout of MarianMT. Raises UserError for a run that it cannot represent."""
  from attention_jax.systems import runs
  from attention_jax.systems.translation import pretrained

  for name in FUNCTION_FLAGS:
    if FLAGS[name].present:
      raise UserError(f'--{name} has no effect with --format=marian; leave it out')
  run = runs.open_run(require_flag('workdir'), FLAGS.checkpoint, dtype=FLAGS.dtype)
  with write_folder_atomic(output) as folder:
    pretrained.write_marian(run, folder)
  print_written(output)


def print_written(output: Path) -> None:
  """Prints the names of the files that were written."""
  print(f'written to {output}: {", ".join(sorted(path.name for path in output.iterdir()))}')


if __name__ == '__main__':
  launch(main)
