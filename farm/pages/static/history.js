// The history of a cell as a chart that can be zoomed. Without this script the page shows a drawing; its table has all numbers.
"use strict";
(() => {
  const place = document.getElementById("chart");
  const rows = [...document.querySelectorAll("#past tr[data-latency]")].reverse();
  if (!place || !window.uPlot || rows.length < 2) return;
  const number = (text) => (text === undefined ? null : Number(text) * 1000);
  const times = rows.map((row) => Number(row.dataset.at));
  const data = [
    times,
    rows.map((row) => number(row.dataset.low)),
    rows.map((row) => number(row.dataset.high)),
    rows.map((row) => number(row.dataset.latency)),
  ];
  const changes = [...document.querySelectorAll("#past tr[data-change]")].map((row) => Number(row.dataset.change));
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const milliseconds = (_, value) => (value === null ? "–" : `${value.toPrecision(3)} ms`);
  const axis = () => ({
    stroke: () => colour("--quiet"),
    grid: { stroke: () => colour("--line"), width: 1 },
    ticks: { stroke: () => colour("--line") },
  });

  function drawChanges(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--warn");
    ctx.setLineDash([6, 4]);
    for (const change of changes) {
      const x = plot.valToPos(change, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  const width = () => Math.min(place.clientWidth, 1100);
  const chart = new uPlot(
    {
      width: width(),
      height: 320,
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
      series: [
        { value: "{YYYY}-{MM}-{DD} {HH}:{mm}" },
        { label: "band from", value: milliseconds, width: 0, points: { show: false } },
        { label: "to", value: milliseconds, width: 0, points: { show: false } },
        { label: "median", value: milliseconds, stroke: () => colour("--p4"), width: 1.5, points: { size: 6 } },
      ],
      bands: [{ series: [2, 1], fill: () => `${colour("--p4")}33` }],
      axes: [axis(), { ...axis(), label: "ms", size: 64 }],
      hooks: { draw: [drawChanges] },
    },
    data,
    document.createElement("div"),
  );
  chart.root.setAttribute("role", "img");
  chart.root.setAttribute("aria-label", "Median latency over time; drag to zoom, the table below has the numbers");
  place.querySelector("svg").replaceWith(chart.root);
  addEventListener("resize", () => chart.setSize({ width: width(), height: 320 }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.redraw());
})();
