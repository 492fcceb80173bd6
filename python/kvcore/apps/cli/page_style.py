# SPDX-License-Identifier: Apache-2.0
"""Style sheet and script of the HTML pages and pictures that commands write."""

__all__ = ["CHART_STYLE", "PAGE_SCRIPT", "PAGE_STYLE", "SLOTS"]

SLOTS = 8

# Distinct also with the common kinds of colour blindness, on white and on black.
_LIGHT = (
    "#0072b2", "#d55e00", "#009e73", "#cc6699", "#c28500", "#5b4bb5", "#8c564b", "#3f7f8f",
)  # fmt: skip
_DARK = (
    "#5cb3ec", "#ff9149", "#30cb9e", "#eaa0ca", "#eec04b", "#b0a3f2", "#cfa298", "#86d3df",
)  # fmt: skip


def _colours(slots: tuple[str, ...]) -> str:
    return "".join(f"--s{i}:{colour};" for i, colour in enumerate(slots))


CHART_STYLE = (
    f":root{{color-scheme:light dark;--ink:#16202a;--soft:#5a6672;--rule:#dfe4e8;--paper:#ffffff;"
    f"--card:#f6f8fa;{_colours(_LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{:root{{--ink:#e8edf2;--soft:#9aa7b3;--rule:#2c3640;"
    f"--paper:#10161c;--card:#171f27;{_colours(_DARK)}}}}}"
    ".chart{display:block;width:100%;height:auto;background:var(--paper);"
    "font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;font-size:12px}"
    ".grid{stroke:var(--rule);fill:none}.axis{stroke:var(--soft);fill:none}"
    ".tick{fill:var(--soft);font-variant-numeric:tabular-nums}.name{fill:var(--ink);font-size:12px}"
    ".end{text-anchor:end}.middle{text-anchor:middle}"
    + "".join(f".s{i}{{--c:var(--s{i})}}" for i in range(SLOTS))
    + ".limit{--c:var(--ink)}"
    ".line{stroke:var(--c);fill:none;stroke-width:2;stroke-linejoin:round}"
    ".limit .line{stroke-dasharray:7 4;stroke-width:1.75}"
    ".mark{fill:var(--c);stroke:var(--paper);stroke-width:1}"
    ".lead{stroke:var(--c);fill:none;opacity:.6}"
    ".end-name{fill:var(--c);font-weight:600}"
)

PAGE_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);line-height:1.5;font-size:15px;
 font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:18px;margin:44px 0 4px}
p{margin:0 0 14px;color:var(--soft);max-width:78ch;overflow-wrap:anywhere}
.decision{border:1px solid var(--rule);border-left:4px solid var(--s0);border-radius:10px;
 background:var(--card);padding:12px 16px;margin:18px 0 12px;overflow-wrap:anywhere}
.decision h2{margin:0 0 4px;font-size:15px}
.decision p{color:var(--ink);margin:0}
.assumed{margin:0 0 8px;padding-left:20px;color:var(--soft);font-size:14px;overflow-wrap:anywhere}
.bars{display:grid;grid-template-columns:auto minmax(60px,1fr) auto;gap:8px 12px;
 align-items:center;font-size:14px;font-variant-numeric:tabular-nums}
.bars div{display:contents}
.bars span{overflow-wrap:anywhere}
.bars i{display:block;height:14px;min-width:2px;border-radius:3px;background:var(--c)}
.bars .limit i{background:none;border:1.5px dashed var(--c)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;
 margin:22px 0 0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 16px}
.tile b{display:block;font-size:22px;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.legend{display:flex;flex-wrap:wrap;gap:6px;margin:10px 0 12px}
.legend button,.legend span{font:inherit;font-size:13px;color:var(--ink);background:none;
 cursor:pointer;border:1px solid var(--rule);border-radius:999px;padding:2px 12px 2px 10px}
.legend button:hover{border-color:var(--c)}
.legend i{display:inline-block;width:16px;height:0;border-top:3px solid var(--c);
 margin-right:7px;vertical-align:middle}
.legend .limit i{border-top-style:dashed;border-top-width:2px}
.legend span{cursor:default}
.legend [aria-pressed=false]{opacity:.45;text-decoration:line-through}
.card{position:relative;border:1px solid var(--rule);border-radius:10px;padding:12px;
 overflow-x:auto;background:var(--paper)}
.narrow{display:none}
.card h3{font-size:14px;margin:2px 4px 6px;font-weight:600}
.cut input{position:absolute;opacity:0;pointer-events:none}
.cut label{display:inline-block;border:1px solid var(--rule);border-radius:8px;padding:2px 12px;
 margin:0 4px 12px 0;cursor:pointer;font-size:13px;font-variant-numeric:tabular-nums}
.cut input:checked+label{background:var(--ink);color:var(--paper);border-color:var(--ink)}
.cut input:focus-visible+label{outline:2px solid var(--s0);outline-offset:2px}
.panel{display:none;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:14px}
.scroll{overflow-x:auto;border:1px solid var(--rule);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:6px 14px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{position:sticky;left:0;background:var(--paper)}
th:first-child{background:var(--card)}
tr:last-child td{border-bottom:0}
th{background:var(--card);font-weight:600;color:var(--soft);font-size:13px}
td.best{font-weight:700}
td.far,th.far{color:var(--soft)}
th.left,td.left{text-align:left}
details{margin-top:14px}
summary{cursor:pointer;color:var(--soft);margin-bottom:8px}
pre{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 16px;
 white-space:pre-wrap;overflow-wrap:anywhere;font-size:13px;margin:0;
 font-family:ui-monospace,Consolas,monospace}
.tip{position:absolute;pointer-events:none;background:var(--card);border:1px solid var(--rule);
 border-radius:8px;padding:6px 10px;font-size:12.5px;box-shadow:0 4px 14px #0003;display:none;
 font-variant-numeric:tabular-nums;z-index:1;white-space:nowrap}
.tip b{display:block;margin-bottom:2px}
.tip div{display:flex;justify-content:space-between;gap:16px}
.tip i{display:inline-block;width:9px;height:9px;border-radius:50%;background:var(--c);
 margin-right:6px}
.cursor path{stroke:var(--soft);stroke-dasharray:2 3;fill:none}
.cursor circle{fill:var(--c);stroke:var(--paper);stroke-width:1.5}
@media (max-width:640px){
main{padding:24px 14px 48px}
h1{font-size:21px}
.wide{display:none}
.narrow{display:block}
.card{padding:8px}
th,td{padding:6px 10px}
.tiles{grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:8px}
.tile b{font-size:18px}
}
footer{margin-top:40px;color:var(--soft);font-size:13px}
@media print{.legend button{border:0}.tip{display:none!important}}
"""

PAGE_SCRIPT = """
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const hidden = new Set();
const write = {
  share: v => (v * 100).toFixed(2) + ' %',
  us: v => (v < 10 ? v.toFixed(2) : v.toFixed(1)) + ' µs',
  pages: v => v.toLocaleString('en') + ' pages',
  gib: v => {
    const [scaled, unit] = v >= 1024 ? [v / 1024, 'TiB'] : v >= 1 ? [v, 'GiB'] : [v * 1024, 'MiB'];
    return +scaled.toFixed(2) + ' ' + unit;
  },
  count: v => v.toFixed(1),
  requests: v => 'request ' + Math.round(v).toLocaleString('en'),
  seconds: v => v.toFixed(1) + ' s',
};
const part = (axis, v) => axis.log
  ? Math.log(v / axis.low) / Math.log(axis.high / axis.low)
  : (v - axis.low) / (axis.high - axis.low);
const place = (chart, [x, y]) => [
  chart.box[0] + part(chart.x, x) * (chart.box[2] - chart.box[0]),
  chart.box[3] - part(chart.y, y) * (chart.box[3] - chart.box[1]),
];
function made(name, parent, kind, text) {
  const found = document.createElement(name);
  if (kind) found.className = kind;
  if (text !== undefined) found.append(text);
  parent.append(found);
  return found;
}
function drawn(name, parent, attributes) {
  const found = document.createElementNS(parent.namespaceURI, name);
  for (const key in attributes) found.setAttribute(key, attributes[key]);
  parent.append(found);
}
function nearest(chart, x) {
  const shown = chart.lines.filter((line, i) => !hidden.has(`${i}`) && line.points.length);
  return shown.map(line => {
    let best = null;
    for (const point of line.points) {
      const at = place(chart, point);
      if (!best || Math.abs(at[0] - x) < Math.abs(best.at[0] - x)) best = {point, at, line};
    }
    return best;
  }).sort((a, b) => b.point[1] - a.point[1]);
}
for (const svg of document.querySelectorAll('svg.chart')) {
  const chart = data[svg.dataset.key], cursor = svg.querySelector('.cursor');
  const tip = made('div', svg.parentNode, 'tip');
  const clear = () => { cursor.replaceChildren(); tip.style.display = 'none'; };
  svg.addEventListener('pointerleave', clear);
  svg.addEventListener('pointermove', event => {
    clear();
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const found = nearest(chart, (event.clientX - box.left) * scale);
    if (!found.length) return;
    const x = found[0].at[0];
    drawn('path', cursor, {d: `M${x} ${chart.box[1]}V${chart.box[3]}`});
    tip.replaceChildren();
    made('b', tip, '', write[chart.x.kind](found[0].point[0]));
    for (const {point, at, line} of found) {
      drawn('circle', cursor, {cx: at[0], cy: at[1], r: 4, class: line.colour});
      const row = made('div', tip, line.colour), name = made('span', row);
      made('i', name);
      name.append(line.name);
      made('span', row, '', write[chart.y.kind](point[1]));
    }
    tip.style.display = 'block';
    const card = svg.parentNode, frame = card.getBoundingClientRect();
    const left = box.left - frame.left + card.scrollLeft + x / scale;
    const fits = left + 14 + tip.offsetWidth < card.scrollLeft + card.clientWidth;
    tip.style.left = (fits ? left + 14 : left - 14 - tip.offsetWidth) + 'px';
    const top = Math.min(event.clientY - frame.top, card.clientHeight - tip.offsetHeight - 6);
    tip.style.top = Math.max(top, 6) + 'px';
  });
}
for (const button of document.querySelectorAll('.legend button')) {
  button.addEventListener('click', () => {
    const line = button.dataset.line;
    const show = hidden.delete(line) || !hidden.add(line);
    button.setAttribute('aria-pressed', show);
    for (const curve of document.querySelectorAll('g.curve.c' + line)) {
      curve.style.display = show ? '' : 'none';
    }
  });
}
"""
