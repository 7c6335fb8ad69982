"""What all HTML pages share: their templates (page/), in which every value is escaped."""

from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / 'page'


def render(template: str, **values: Any) -> str:
  """Returns the text of a page; a value is text, or data that become JSON.

  Args:
    template: file name of a template in `page/`.
    **values: the variables of the template.
  """
  import jinja2

  loader = jinja2.FileSystemLoader(TEMPLATES)
  environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
  environment.policies['json.dumps_kwargs'] = {'sort_keys': False}  # layers and heads stay in their order
  return environment.get_template(template).render(values)
