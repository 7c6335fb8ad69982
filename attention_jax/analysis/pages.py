"""Renders HTML pages from the templates in page/, which escape every value."""

from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / 'page'


def render(template: str, **values: Any) -> str:
  """Returns the HTML of a page.

  Args:
    template: file name of a template in `page/`.
    **values: the variables of the template: text, or data that the template turns into JSON.
  """
  import jinja2

  loader = jinja2.FileSystemLoader(TEMPLATES)
  environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
  environment.policies['json.dumps_kwargs'] = {'sort_keys': False}  # layers and heads stay in their order
  return environment.get_template(template).render(values)
