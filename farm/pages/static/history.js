// The history of a cell as a chart that can be zoomed. Without this script the page shows a drawing; its tables have all numbers.
"use strict";
(() => {
  const place = document.getElementById("chart");
  const rows = [...document.querySelectorAll("#past tr[data-latency]")].reverse();
  if (!place || !window.uPlot || rows.length < 2) return;
  const number = (text) => (text === undefined ? null : Number(text) * 1000);
  const data = [
    rows.map((row) => Number(row.dataset.at)),
    rows.map((row) => number(row.dataset.low)),
    rows.map((row) => number(row.dataset.high)),
    rows.map((row) => number(row.dataset.latency)),
  ];
  const newest = rows.length - 1;
  const failed = [...document.querySelectorAll("#past tr[data-failed]")].map((row) => Number(row.dataset.failed));
  const marks = [...document.querySelectorAll("#marks tr[data-at]")].reverse().map((row) => row.dataset);
  const LINE = 14; // pixels of a line of labels
  const LINES = Math.min(marks.length, 3);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourOf = (moved) => colour(moved === "slower" ? "--bad" : moved === "faster" ? "--good" : "--warn");
  const milliseconds = (_, value) => (value === null ? "–" : `${value.toPrecision(3)} ms`);
  // Per distance of the ticks: what each says, and what the first one of a year or a day adds.
  const times = [
    [365 * 86400, "{YYYY}", null, null, null, null, null, null, 1],
    [28 * 86400, "{MMM}", "\n{YYYY}", null, null, null, null, null, 1],
    [86400, "{D} {MMM}", "\n{YYYY}", null, null, null, null, null, 1],
    [60, "{HH}:{mm}", "\n{D} {MMM} {YYYY}", null, "\n{D} {MMM}", null, null, null, 1],
    [1, "{HH}:{mm}:{ss}", "\n{D} {MMM} {YYYY}", null, "\n{D} {MMM}", null, null, null, 1],
  ];
  const axis = () => ({
    stroke: () => colour("--quiet"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line") },
  });

  function draw(plot) {
    const { ctx, bbox } = plot;
    const ratio = uPlot.pxRatio;
    const right = bbox.left + bbox.width;
    const bottom = bbox.top + bbox.height;
    const write = (text, x, y, name, align) => {
      ctx.fillStyle = name;
      ctx.textAlign = align;
      ctx.fillText(text, x, y);
    };
    const dot = (index, name) => {
      ctx.fillStyle = name;
      ctx.beginPath();
      ctx.arc(plot.valToPos(data[0][index], "x", true), plot.valToPos(data[3][index], "y", true), 4 * ratio, 0, 7);
      ctx.fill();
    };
    const inside = (x) => x >= bbox.left && x <= right;
    ctx.save();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.setLineDash([6, 4]);
    const ends = Array(LINES).fill(-Infinity);
    for (const mark of marks) {
      const x = plot.valToPos(Number(mark.at), "x", true);
      if (!inside(x)) continue;
      const width = ctx.measureText(mark.label).width + 12 * ratio;
      const begin = Math.min(x, right + 60 * ratio - width);
      const free = ends.findIndex((end) => end <= begin);
      const line = free < 0 ? LINES - 1 : free;
      ends[line] = begin + width;
      const y = bbox.top - ((LINES - line - 1) * LINE + 4) * ratio;
      write(mark.label, begin, y, colourOf(mark.moved), "left");
      ctx.strokeStyle = colourOf(mark.moved);
      ctx.beginPath();
      ctx.moveTo(x, y + 3 * ratio);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
    for (const x of failed.map((at) => plot.valToPos(at, "x", true)).filter(inside)) {
      write("✗", x, bottom - 4 * ratio, colour("--bad"), "center");
    }
    rows.forEach((row, index) => {
      if (row.dataset.moved && inside(plot.valToPos(data[0][index], "x", true))) dot(index, colourOf(row.dataset.moved));
    });
    const x = plot.valToPos(data[0][newest], "x", true);
    if (inside(x)) {
      dot(newest, rows[newest].dataset.moved ? colourOf(rows[newest].dataset.moved) : colour("--ink"));
      const y = plot.valToPos(data[3][newest], "y", true) + 4 * ratio;
      write(milliseconds(plot, data[3][newest]), x + 8 * ratio, y, colour("--ink"), "left");
    }
    ctx.restore();
  }

  // Where nothing is pointed at, the legend has the newest values.
  const idle = (plot) => {
    if (plot.cursor.idx == null) plot.setLegend({ idx: newest });
  };
  const size = () => ({ width: place.clientWidth, height: 320 });
  const chart = new uPlot(
    {
      ...size(),
      padding: [LINES * LINE + 8, 68, 0, 0],
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
      series: [
        { label: "ended", value: "{YYYY}-{MM}-{DD} {HH}:{mm}" },
        { label: "band from", value: milliseconds, width: 0, points: { show: false } },
        { label: "to", value: milliseconds, width: 0, points: { show: false } },
        { label: "median", value: milliseconds, stroke: () => colour("--p4"), width: 1.5, points: { size: 6 } },
      ],
      bands: [{ series: [2, 1], fill: () => `${colour("--p4")}33` }],
      axes: [{ ...axis(), space: 64, values: times }, { ...axis(), size: 72, values: (_, ticks) => ticks.map((tick) => `${tick} ms`) }],
      hooks: { draw: [draw], ready: [idle], setCursor: [idle] },
    },
    data,
    document.createElement("div"),
  );
  chart.root.setAttribute("role", "img");
  chart.root.setAttribute("aria-label", "Median latency over time; drag to zoom, the tables below have the numbers");
  place.prepend(chart.root); // The drawing is for paper.
  addEventListener("resize", () => chart.setSize(size()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.redraw());
})();
