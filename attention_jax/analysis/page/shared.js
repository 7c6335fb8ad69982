'use strict';
// Functions of all pages: elements, colours, heatmaps, and the controls of examples and steps.
// Text is only ever set by textContent, so that no token is read as HTML.
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId('data').textContent);
const state = {example: 0, step: -1}; // step -1 shows all steps

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function formatNumber(x) {
  return x === null ? '–' : Math.abs(x) >= 0.001 || x === 0 ? x.toFixed(3) : x.toExponential(1);
}

function fill(select, options, selected) {
  select.replaceChildren(...options.map(([value, text]) => element('option', {value, textContent: text})));
  select.value = selected;
}

function token(text, index, kind) {
  const node = element('div', {className: 'token', dir: 'auto', tabIndex: 0}, element('bdi', {textContent: text}));
  node.dataset.kind = kind;
  node.dataset.index = index;
  return node;
}

// How strongly a value is drawn, from 0 to 1.
function strength(value, scale) {
  return value === null ? 0 : Math.min(1, Math.abs(value) / scale);
}

function scaleOf(matrix) {
  const largest = Math.max(...matrix.map((row) => Math.max(...row.map((x) => Math.abs(x || 0)), 0)), 0);
  const isWeight = largest <= 1 && matrix.every((row) => row.every((x) => x === null || x >= 0));
  return byId('relative').checked || !isWeight ? largest || 1 : 1;
}

function fillColour(value, scale) {
  return `rgba(var(--${value < 0 ? 'negative' : 'weight'}), ${strength(value, scale).toFixed(3)})`;
}

function headRow(texts) {
  const cells = texts.map((text) => element('th', {scope: 'col'}, element('span', {dir: 'auto', textContent: text})));
  return element('tr', {}, element('th'), ...cells);
}

// A row of a heatmap; labelOf(column) is the label of a cell, and decorate(cell, column) sets its class and data.
function heatRow(text, values, scale, labelOf, decorate) {
  const cells = values.map((value, column) => {
    const cell = element('td', {title: `${labelOf(column)}: ${formatNumber(value)}`});
    cell.style.background = fillColour(value, scale);
    decorate(cell, column);
    return cell;
  });
  return element('tr', {}, element('th', {scope: 'row', dir: 'auto', textContent: text}), ...cells);
}

// Calls show(choice) for the element of `panel` under the pointer or with the focus, and showStep() when it is left.
// choiceOf(node) is null for an element that cannot be chosen.
function followPointer(panel, choiceOf, show, showStep) {
  for (const type of ['mouseover', 'focusin']) {
    panel.addEventListener(type, (event) => { const chosen = choiceOf(event.target); if (chosen) show(chosen); });
  }
  for (const type of ['mouseout', 'focusout']) panel.addEventListener(type, showStep);
}

const toggleTheme = () => document.documentElement.classList.toggle('dark');

// Connects the controls: draw() draws an example, drawStep() redraws the parts that depend on the step; reset() is called
// before another example is drawn.
function connectControls(names, draw, drawStep, reset = () => {}) {
  const goTo = (example) => {
    state.example = (example + names.length) % names.length;
    state.step = -1;
    reset();
    draw();
    byId('example').value = state.example;
  };
  byId('example').addEventListener('change', (event) => goTo(Number(event.target.value)));
  byId('previous').addEventListener('click', () => goTo(state.example - 1));
  byId('next').addEventListener('click', () => goTo(state.example + 1));
  byId('step').addEventListener('input', (event) => { state.step = Number(event.target.value); drawStep(); });
  byId('relative').addEventListener('change', draw);
  byId('theme').addEventListener('click', toggleTheme);
  document.addEventListener('keydown', (event) => {
    if (event.target.matches('select, input') || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {n: () => goTo(state.example + 1), p: () => goTo(state.example - 1), d: toggleTheme};
    actions[event.key]?.();
  });
  if (matchMedia('(prefers-color-scheme: dark)').matches) toggleTheme();
  fill(byId('example'), names.map((name, i) => [i, name]), 0);
  draw();
}

// Sets the slider to the current step of `count` steps; nameOf(step) is written beside it.
function setSlider(count, nameOf) {
  state.step = Math.min(state.step, count - 1);
  byId('step').max = count - 1;
  byId('step').value = state.step;
  byId('step-name').textContent = state.step < 0 ? 'all' : `${state.step + 1} ${nameOf(state.step)}`;
}
