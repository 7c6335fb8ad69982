"""Files of hypotheses: one text per line, or the objects of translate --json."""

import json

import pytest

from attention_jax.decoding.hypothesis_files import read_candidates
from attention_jax.decoding.minimum_bayes_risk import Candidates, combine_hypotheses
from attention_jax.errors import UserError


def test_a_text_file_has_one_hypothesis_per_line(tmp_path):
  path = tmp_path / 'a.txt'
  path.write_text('a b\n\n{}\n')
  assert read_candidates(str(path)) == [Candidates(['a b']), Candidates(['']), Candidates(['{}'])]


def test_a_file_of_lists_has_probabilities_unless_they_are_samples(tmp_path):
  hypotheses = [{'text': 'a', 'log_prob': -1.5}, {'text': 'b', 'log_prob': -2}]
  records = [{'hypotheses': hypotheses}, {'hypotheses': hypotheses, 'sampled': True}, {'hypotheses': []}]
  path = tmp_path / 'a.jsonl'
  path.write_text(''.join(f'{json.dumps(record)}\n' for record in records))
  assert read_candidates(str(path)) == [Candidates(['a', 'b'], [-1.5, -2]), Candidates(['a', 'b']), Candidates([''])]


@pytest.mark.parametrize(
  'line',
  [
    'a b',
    '[]',
    '{"hypotheses": ["a"]}',
    '{"hypotheses": [{"text": "a"}]}',
    '{"hypotheses": [{"text": 1, "log_prob": 0}]}',
    '{"hypotheses": [{"text": "a", "log_prob": true}]}',
    '{"hypotheses": [{"text": "a", "log_prob": -Infinity}]}',
    pytest.param(f'{{"hypotheses": [{{"text": "a", "log_prob": -1{"0" * 400}}}]}}', id='more than a float'),
    pytest.param(f'{{"hypotheses": [{{"text": "a", "log_prob": -1{"0" * 5000}}}]}}', id='too many digits'),
    '{"hypotheses": [{"text": "a\\nb", "log_prob": -1}]}',
    '{"hypotheses": [{"text": "\\ud800", "log_prob": -1}]}',
    pytest.param('[' * 100_000, id='nested'),
  ],
)
def test_any_other_line_is_an_error_with_its_number(tmp_path, line):
  path = tmp_path / 'a.json'
  path.write_text(f'{{"hypotheses": []}}\n{line}\n')
  with pytest.raises(UserError, match=r'a\.json:2: expected an object with "hypotheses"'):
    read_candidates(str(path))
  path.write_text('{"hypotheses": [], "sampled": "false"}\n')
  with pytest.raises(UserError, match=r'a\.json:1: "sampled" must be true or false'):
    read_candidates(str(path))


def test_large_whole_numbers_are_log_probabilities(tmp_path):
  path = tmp_path / 'a.json'
  path.write_text(f'{{"hypotheses": [{{"text": "a", "log_prob": -1{"0" * 30}}}]}}\n')
  (candidates,) = read_candidates(str(path))
  assert combine_hypotheses([[candidates]], 'exact_match') == ['a']
