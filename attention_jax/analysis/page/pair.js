// The page of pairs. `data` is a list of runs {name, readings}; a reading has tokens, matrices by name, gold links, and
// measurements.
const runs = data;
const names = [...new Set(runs.flatMap((run) => run.readings.map((reading) => reading.name)))];
Object.assign(state, {hypothesis: 0, matrix: 'weights'});

function readingsOf(run) {
  return run.readings.filter((reading) => reading.name === names[state.example]);
}

function current(run) {
  const readings = readingsOf(run);
  return readings[Math.min(state.hypothesis, readings.length - 1)];
}

function matrixOf(reading) {
  return reading.matrices[state.matrix] || reading.matrices.weights;
}

function drawColumns(reading) {
  const source = element('div', {className: 'column source'}, ...reading.source_tokens.map((t, s) => token(t, s, 'source')));
  const target = element('div', {className: 'column target'}, ...reading.target_tokens.map((t, i) => token(t, i, 'target')));
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('class', 'links');
  svg.setAttribute('aria-hidden', 'true');
  return element('div', {className: 'columns'}, source, element('div', {}, svg), target);
}

// Class of a gold link: 'gold' if it is sure, else 'gold possible'.
function goldKind(reading, s, t) {
  const isSure = !reading.sure || reading.sure.some((link) => link[0] === s && link[1] === t);
  return isSure ? 'gold' : 'gold possible';
}

// Draws the lines of the chosen target or source token, or those of all tokens.
function drawLinks(panel, reading, matrix, scale, chosen) {
  const svg = panel.querySelector('svg');
  const height = 26; // of a token with its gap, see page.css
  const rows = Math.max(reading.source_tokens.length, reading.target_tokens.length);
  svg.parentNode.style.height = `${rows * height}px`;
  const width = svg.parentNode.clientWidth || 192;
  const lines = [];
  const add = (s, t, className, opacity, label) => {
    const line = document.createElementNS('http://www.w3.org/2000/svg', 'line');
    const position = {x1: 0, y1: (s + 0.5) * height, x2: width, y2: (t + 0.5) * height, class: className};
    for (const [name, value] of Object.entries(position)) line.setAttribute(name, value);
    line.style.opacity = opacity;
    const title = document.createElementNS('http://www.w3.org/2000/svg', 'title');
    title.textContent = label;
    line.append(title);
    lines.push(line);
  };
  const isChosen = (s, t) => !chosen || (chosen.kind === 'target' ? t === chosen.index : s === chosen.index);
  matrix.forEach((row, t) => row.forEach((value, s) => {
    const opacity = strength(value, scale);
    if (isChosen(s, t) && opacity > 0.02) {
      const label = `${reading.target_tokens[t]} → ${reading.source_tokens[s]}: ${formatNumber(value)}`;
      add(s, t, value < 0 ? 'negative' : '', opacity, label);
    }
  }));
  if (byId('gold').checked) {
    for (const [s, t] of reading.gold || []) {
      const kind = goldKind(reading, s, t);
      if (isChosen(s, t)) add(s, t, kind, 1, kind);
    }
  }
  svg.replaceChildren(...lines);
}

function drawHeat(reading, matrix, scale) {
  const gold = new Set(byId('gold').checked ? (reading.gold || []).map(([s, t]) => `${s},${t}`) : []);
  const body = matrix.map((row, t) => {
    const target = reading.target_tokens[t];
    return heatRow(target, row, scale, (s) => `${target} → ${reading.source_tokens[s]}`, (cell, s) => {
      cell.className = gold.has(`${s},${t}`) ? goldKind(reading, s, t) : '';
      cell.dataset.source = s;
      cell.dataset.target = t;
    });
  });
  const head = element('thead', {}, headRow(reading.source_tokens));
  return element('table', {className: 'heat'}, head, element('tbody', {}, ...body));
}

// A table for every measurement that is not a matrix [target tokens, source tokens].
function drawMeasures(reading) {
  const tables = Object.entries(reading.measurements).filter(([name]) => !(name in reading.matrices));
  return tables.map(([name, measured]) => (measured.axes.length < 2 ? drawList : drawSquare)(name, measured));
}

function drawList(name, measured) {
  const axis = measured.axes[0] || ['value'];
  const values = measured.axes.length ? measured.values : [measured.values];
  return element('table', {className: 'measures'},
    element('tr', {}, element('th', {textContent: ''}), ...axis.map((text) => element('td', {dir: 'auto', textContent: text}))),
    element('tr', {}, element('th', {textContent: name}), ...values.map((x) => element('td', {textContent: formatNumber(x)}))));
}

// A heatmap of a measurement with two axes, such as self-attention [source tokens, source tokens].
function drawSquare(name, {axes: [rows, columns], values}) {
  const scale = scaleOf(values);
  const body = values.map((row, i) => heatRow(rows[i], row, scale, (j) => `${rows[i]} → ${columns[j]}`, () => {}));
  return element('table', {className: 'heat'}, element('caption', {textContent: name}),
    element('thead', {}, headRow(columns)), element('tbody', {}, ...body));
}

function facts(reading) {
  const parts = [`${reading.source} → ${reading.target}`];
  if (reading.score !== null) parts.push(`score ${formatNumber(reading.score)}`);
  if (reading.agreement) {
    for (const [name, value] of Object.entries(reading.agreement)) parts.push(`${name} ${(100 * value).toFixed(0)} %`);
  }
  return parts.join(' · ');
}

// Shows the weights of the chosen token; without one, the lines of all tokens.
function showWeights(panel, reading, matrix, scale, chosen) {
  drawLinks(panel, reading, matrix, scale, chosen);
  const valueOf = (kind, index) => {
    if (!chosen || chosen.kind === kind) return null;
    return kind === 'source' ? matrix[chosen.index][index] : matrix[index][chosen.index];
  };
  for (const node of panel.querySelectorAll('.token')) {
    const index = Number(node.dataset.index);
    const value = valueOf(node.dataset.kind, index);
    node.style.background = value === null ? '' : fillColour(value, scale);
    node.style.color = value !== null && strength(value, scale) > 0.55 ? 'var(--paper)' : '';
    node.classList.toggle('current', Boolean(chosen) && chosen.kind === node.dataset.kind && chosen.index === index);
    node.querySelector('.value')?.remove();
    if (value !== null && strength(value, scale) >= 0.05) node.append(element('span', {className: 'value', textContent: formatNumber(value)}));
  }
  panel.querySelector('.reading').textContent = chosen ? describe(reading, matrix, chosen) : '';
}

function describe(reading, matrix, chosen) {
  const isTarget = chosen.kind === 'target';
  const otherTokens = isTarget ? reading.source_tokens : reading.target_tokens;
  const values = isTarget ? matrix[chosen.index] : matrix.map((row) => row[chosen.index]);
  const chosenToken = (isTarget ? reading.target_tokens : reading.source_tokens)[chosen.index];
  const best = values.map((value, i) => [Math.abs(value || 0), i]).sort((a, b) => b[0] - a[0]).slice(0, 3);
  return `${chosenToken}: ${best.map(([, i]) => `${otherTokens[i]} ${formatNumber(values[i])}`).join(', ')}`;
}

function drawPanel(run) {
  const reading = current(run);
  const panel = element('section', {className: 'panel'}, element('h2', {textContent: run.name, dir: 'auto'}));
  if (!reading) return panel;
  const matrix = matrixOf(reading);
  const scale = scaleOf(matrix);
  panel.append(
    element('p', {className: 'facts', dir: 'auto', textContent: facts(reading)}),
    element('p', {className: 'reading', dir: 'auto'}),
    element('div', {className: 'views'}, drawColumns(reading), drawHeat(reading, matrix, scale)),
    ...drawMeasures(reading));
  const stepChoice = () => (state.step < 0 || state.step >= matrix.length ? null : {kind: 'target', index: state.step});
  const show = (chosen) => showWeights(panel, reading, matrix, scale, chosen);
  const choiceOf = (target) => {
    const node = target.closest('.token');
    if (node) return {kind: node.dataset.kind, index: Number(node.dataset.index)};
    const cell = target.closest('td[data-target]');
    return cell && {kind: 'target', index: Number(cell.dataset.target)};
  };
  followPointer(panel, choiceOf, show, () => show(stepChoice()));
  panel.refresh = () => show(stepChoice());
  return panel;
}

function draw() {
  const readings = runs.map(current).filter(Boolean);
  const counts = runs.map((run) => readingsOf(run).length);
  const matrices = [...new Set(readings.flatMap((reading) => Object.keys(reading.matrices)))];
  if (!matrices.includes(state.matrix)) state.matrix = 'weights';
  fill(byId('matrix'), matrices.map((name) => [name, name]), state.matrix);
  byId('hypothesis-label').hidden = Math.max(...counts) < 2;
  fill(byId('hypothesis'), Array.from({length: Math.max(...counts)}, (_, i) => [i, String(i + 1)]), state.hypothesis);
  byId('gold-label').hidden = !readings.some((reading) => reading.gold);
  byId('panels').replaceChildren(...runs.map(drawPanel));
  drawStep();
}

function drawStep() {
  const readings = runs.map(current).filter(Boolean);
  const steps = Math.max(...readings.map((reading) => reading.target_tokens.length));
  setSlider(steps, (step) => readings[0].target_tokens[step] || '');
  for (const panel of byId('panels').children) panel.refresh?.();
}

byId('hypothesis').addEventListener('change', (event) => { state.hypothesis = Number(event.target.value); draw(); });
byId('matrix').addEventListener('change', (event) => { state.matrix = event.target.value; draw(); });
byId('gold').addEventListener('change', draw);
connectControls(names, draw, drawStep, () => { state.hypothesis = 0; });
