// The page of pictures, glimpses and memories. `data` is a list of examples {name, facts, steps, frames, boxes, path,
// details, tables}, see picture_page.py; index 0 of frames and boxes is that of all steps.
const SVG = 'http://www.w3.org/2000/svg';

function shape(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// The entry of a step. Entry 0 is that of all steps together; without further entries, it is also that of each step.
function atStep(entries, step) {
  return entries[Math.min(step + 1, entries.length - 1)];
}

// Boxes, and the path up to the step, in units of the width and height of the picture.
function drawMarks(item, step) {
  const boxes = (atStep(item.boxes, step) || []).map(([left, top, right, bottom]) =>
    shape('rect', {class: 'box', x: left, y: top, width: right - left, height: bottom - top}));
  const points = item.path.slice(0, step < 0 ? item.path.length : step + 1);
  const line = shape('polyline', {class: 'path', points: points.map((point) => point.join(',')).join(' ')});
  return points.length ? [...boxes, line] : boxes;
}

// Numbers of the path, as elements over the picture: text in the SVG would be stretched with it.
function drawNumbers(item, step) {
  return item.path.slice(0, step < 0 ? item.path.length : step + 1).map(([x, y], i) => {
    const node = element('span', {className: 'number', textContent: String(i + 1)});
    node.style.left = `${100 * x}%`;
    node.style.top = `${100 * y}%`;
    return node;
  });
}

function drawStage(item) {
  const picture = element('img', {className: 'picture'});
  picture.addEventListener('load', () => picture.classList.toggle('coarse', picture.naturalWidth < 100));
  const marks = shape('svg', {class: 'marks', viewBox: '0 0 1 1', preserveAspectRatio: 'none', 'aria-hidden': 'true'});
  const over = element('div', {className: 'over'}, picture, marks, element('div', {className: 'numbers'}));
  return element('div', {className: 'stage'}, over, element('img', {className: 'detail coarse'}));
}

function showStage(panel, item, step) {
  const picture = panel.querySelector('.picture');
  picture.src = atStep(item.frames, step);
  picture.alt = stepText(item, step);
  panel.querySelector('.marks').replaceChildren(...drawMarks(item, step));
  panel.querySelector('.numbers').replaceChildren(...drawNumbers(item, step));
  const detail = panel.querySelector('.detail');
  detail.hidden = step < 0 || !item.details.length;
  if (!detail.hidden) {
    detail.src = item.details[step];
    detail.alt = `what is read at ${stepText(item, step)}`;
  }
}

// All tables of an example in one, so that their columns, which are steps, stand below each other.
function drawTables(item) {
  const bodies = item.tables.map((table) => {
    const scale = scaleOf(table.values);
    const title = element('th', {scope: 'rowgroup', colSpan: item.steps.length + 1, className: 'title', textContent: table.title});
    const rows = table.values.map((values, row) => {
      const labelOf = (step) => `${item.steps[step]}, ${table.title}, ${table.rows[row]}`;
      return heatRow(table.rows[row], values, scale, labelOf, (cell, step) => { cell.dataset.step = step; });
    });
    return element('tbody', {}, element('tr', {}, title), ...rows);
  });
  return element('table', {className: 'heat'}, element('thead', {}, headRow(item.steps)), ...bodies);
}

function stepText(item, step) {
  return step < 0 ? item.name : `step ${step + 1} of ${item.steps.length}: ${item.steps[step]}`;
}

// The step in words, with the row of the largest absolute value of each table that is not zero at this step.
function describe(item, step) {
  if (step < 0) return '';
  const largest = item.tables.map((table) => {
    const column = table.values.map((values) => Math.abs(values[step] || 0));
    const row = column.indexOf(Math.max(...column));
    return column[row] ? `${table.title}: ${table.rows[row]} ${formatNumber(table.values[row][step])}` : '';
  });
  return [stepText(item, step), ...largest.filter(Boolean)].join(' · ');
}

function show(panel, item, step) {
  if (item.frames.length) showStage(panel, item, step);
  for (const node of panel.querySelectorAll('.current')) node.classList.remove('current');
  for (const node of panel.querySelectorAll(`[data-step="${step}"]`)) node.classList.add('current');
  panel.querySelector('.reading').textContent = describe(item, step);
}

function drawPanel(item) {
  const steps = item.steps.map((text, step) => {
    const node = token(text, step, 'step');
    node.dataset.step = step;
    return node;
  });
  const panel = element('section', {className: 'panel'}, element('h2', {textContent: item.name, dir: 'auto'}),
    ...item.facts.map((text) => element('p', {className: 'facts', dir: 'auto', textContent: text})),
    element('p', {className: 'reading', dir: 'auto'}), element('div', {className: 'steps', dir: 'auto'}, ...steps));
  if (item.frames.length) panel.append(drawStage(item));
  if (item.tables.length) panel.append(drawTables(item));
  const stepOf = (target) => {
    const node = target.closest('[data-step]');
    return node && {step: Number(node.dataset.step)};
  };
  followPointer(panel, stepOf, (chosen) => show(panel, item, chosen.step), () => show(panel, item, state.step));
  const select = (target) => {
    const chosen = stepOf(target);
    if (chosen) { state.step = chosen.step; drawStep(); }
  };
  panel.addEventListener('click', (event) => select(event.target));
  panel.addEventListener('keydown', (event) => { if (event.key === 'Enter') select(event.target); });
  panel.refresh = () => show(panel, item, state.step);
  return panel;
}

function draw() {
  byId('panels').replaceChildren(drawPanel(data[state.example]));
  drawStep();
}

function drawStep() {
  const item = data[state.example];
  setSlider(item.steps.length, (step) => item.steps[step]);
  byId('panels').firstChild.refresh();
}

byId('relative').parentNode.hidden = !data.some((item) => item.tables.length);
connectControls(data.map((item) => item.name), draw, drawStep);
