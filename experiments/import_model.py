"""Makes a run of a pretrained model of transformers: Marian, BART, mBART, T5, or the encoder BERT.

  python -m experiments.import_model --from=opus-mt-en-de --workdir=runs/opus
  echo 'A dog runs.' | python -m experiments.translate --workdir=runs/opus

--from is a folder with config.json, model.safetensors and the files of the tokenizer; nothing is downloaded. --task and
--folder name data for evaluations; docs/interop.md shows how to evaluate the run and to train it further.
"""

from absl import flags

from experiments.launch import FLAGS, check_output_folder, launch, require_flag

flags.DEFINE_string('from', None, 'the folder of the model')
flags.DEFINE_string('workdir', None, 'the new run folder')
flags.DEFINE_string('task', None, 'config.data.task of the run; by default files train, validation and test of texts')
flags.DEFINE_string('folder', 'data', 'config.data.folder of the run')


def main() -> None:
  """Writes the run folder --workdir of the model --from."""
  from attention_jax.systems.translation import pretrained

  source = require_flag('from')
  workdir = check_output_folder(require_flag('workdir'), 'workdir')
  model = pretrained.import_model(source, workdir, FLAGS.task or pretrained.TASK, FLAGS.folder)
  print(f'written to {workdir}: {model.system.config.model.encoder}')
  if not model.architecture.has_decoder:
    print('the decoder is random: train it before it translates, see docs/interop.md')


if __name__ == '__main__':
  launch(main)
