"use strict";
// Draws every chart of the embedded data as SVG, with the values under the pointer in its legend.
const WIDTH = 420, HEIGHT = 230, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 32;

function svg(name, attributes, parent) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function html(name, className, text, parent) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

// Round numbers that cover the range in about four steps.
function ticks(low, high) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function range(values) {
  const low = Math.min(...values), high = Math.max(...values);
  const margin = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

function label(value, percent) {
  if (percent) return (value * 100).toFixed(1) + "%";
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

function nearest(points, x) {
  return points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
}

function draw(chart, parent) {
  const box = html("div", "chart", "", parent);
  html("h3", "", chart.title, box);
  const series = chart.series.filter(s => s.points.length);
  const all = series.flatMap(s => s.points);
  const xs = all.map(p => p[0]), [low, high] = range(all.map(p => p[1]));
  const first = Math.min(...xs), last = Math.max(...xs);
  const x = v => LEFT + (last > first ? (v - first) / (last - first) : 0.5) * (WIDTH - LEFT - RIGHT);
  const y = v => TOP + (high - v) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const picture = svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title}, box);
  for (const value of ticks(low, high)) {
    svg("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value)}, picture);
    svg("text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, picture).textContent = label(value, chart.percent);
  }
  for (const value of last > first ? ticks(first, last) : [first]) {
    svg("text", {x: x(value), y: HEIGHT - BOTTOM + 14, "text-anchor": "middle"}, picture).textContent = label(value, false);
  }
  svg("text", {x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end"}, picture).textContent = chart.x_label;
  series.forEach((s, number) => {
    const style = `stroke: var(--series-${number % 5}); fill: var(--series-${number % 5})`;
    if (s.points.length > 1) {
      const points = s.points.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
      svg("polyline", {points, style: style + "; fill: none"}, picture);
    } else {
      svg("circle", {cx: x(s.points[0][0]), cy: y(s.points[0][1]), r: 4, style}, picture);
    }
  });
  const cursor = svg("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"}, picture);
  const legend = html("div", "legend", "", box);
  const values = series.map((s, number) => {
    const entry = html("span", "", "", legend);
    html("span", "mark", "", entry).style.background = `var(--series-${number % 5})`;
    return html("span", "", "", entry);
  });
  // Without a pointer the legend shows where each curve ends.
  const read = at => series.forEach((s, number) => {
    const point = at === null ? s.points[s.points.length - 1] : nearest(s.points, at);
    values[number].textContent = `${s.name} ${label(point[1], chart.percent)}`;
  });
  picture.addEventListener("pointermove", event => {
    const bounds = picture.getBoundingClientRect();
    const place = (event.clientX - bounds.left) / bounds.width * WIDTH;
    const at = first + (place - LEFT) / (WIDTH - LEFT - RIGHT) * (last - first);
    const snapped = nearest(all, at)[0];
    cursor.setAttribute("x1", x(snapped));
    cursor.setAttribute("x2", x(snapped));
    cursor.setAttribute("visibility", "visible");
    read(snapped);
  });
  picture.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); read(null); });
  read(null);
}

const charts = JSON.parse(document.getElementById("chart-data").textContent);
charts.forEach(chart => draw(chart, document.getElementById("charts")));
