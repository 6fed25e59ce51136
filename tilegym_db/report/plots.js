"use strict";
// Scales, axes, lines, symbols and formats of numbers are D3's. A mark is a button of the page: it has a name for screen readers, it is
// reached with the keyboard, shows its figures and opens its evidence.
const plots = (() => {
  const EDGE = { left: 76, right: 46, top: 18, bottom: 46 };
  const SYMBOLS = { triton: d3.symbolCircle, tilelang: d3.symbolSquare, cutile: d3.symbolTriangle, python: d3.symbolDiamond2 };
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "14 4", "4 6", "14 3 2 3 2 3"]; // of the solutions of one language
  const signOf = (language) => d3.symbol(SYMBOLS[language] ?? d3.symbolDiamond2, 66)();
  const figure = (value, digits = 4) => value === null || value === undefined ? "" : d3.format(`.${digits}~r`)(value);
  const unit = (value, name) => d3.format(".4~s")(value).replace(/[a-zA-Z]?$/, (prefix) => ` ${prefix}${name}`).trim();
  const padded = (values) => { const [least, most] = d3.extent(values); return [least / 1.4, most * 1.4]; };

  const isSmall = () => matchMedia("(max-width: 46rem)").matches;
  const units = () => isSmall() ? 400 : Math.max(700, Math.min(960, document.body.clientWidth - 40)); // as many units as pixels, so that letters stay readable

  function frame(label, across, up) { // two axes with their grid, logarithmic unless `across` has positions to give names to
    const width = units(), height = isSmall() ? 340 : 440;
    const [floor, end] = [height - EDGE.bottom, width - EDGE.right];
    const x = across.places ? d3.scalePoint(across.places, [EDGE.left, end]).padding(0.5) : d3.scaleLog(across.domain, [EDGE.left, end]), y = d3.scaleLog(up.domain, [floor, EDGE.top]);
    const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("role", "group").attr("aria-label", label);
    const named = (text, where) => svg.append("text").attr("text-anchor", "middle").attr("transform", where).text(text);
    named(across.name, `translate(${(EDGE.left + end) / 2} ${height - 8})`);
    named(up.name, `translate(16 ${(EDGE.top + floor) / 2}) rotate(-90)`);
    const axis = (draw, where) => svg.append("g").attr("class", "axis").attr("transform", where).call(draw.tickPadding(9))
      .selectAll(".tick").classed("minor", function () { return !this.textContent; });
    const most = (end - EDGE.left) / 110, every = across.places ? Math.ceil(across.places.length / most) : 1;
    const below = across.places ? d3.axisBottom(x).tickValues(across.places.filter((_, at) => at % every === 0)).tickFormat(across.tick) : d3.axisBottom(x).ticks(most, across.tick);
    axis(below.tickSize(EDGE.top - floor), `translate(0 ${floor})`);
    axis(d3.axisLeft(y).ticks((floor - EDGE.top) / 50, up.tick).tickSize(EDGE.left - end), `translate(${EDGE.left} 0)`);
    return { svg, x, y, end };
  }
  function tip(node, text) {
    const box = node.getBoundingClientRect(), place = document.getElementById("tip");
    (node.closest("dialog") ?? document.body).append(place); // an open dialog covers what is outside
    place.textContent = text;
    place.hidden = false;
    place.style.left = `${Math.max(4, Math.min(box.right + 8, innerWidth - place.offsetWidth - 8))}px`;
    place.style.top = `${Math.max(4, Math.min(box.bottom + 8, innerHeight - place.offsetHeight - 8))}px`;
  }
  function addMarks(svg, marks, open) { // marks: { row, x, y, text }
    const nodes = svg.append("g").selectAll("path").data(marks).join("path")
      .attr("class", ({ row }) => `point ${row.language}${row.is_current === false ? " old" : ""}`).attr("d", ({ row }) => signOf(row.language)).attr("transform", ({ x, y }) => `translate(${x} ${y})`)
      .attr("role", "button").attr("tabindex", (_, index) => (index ? -1 : 0)).attr("aria-label", ({ text }) => text.replaceAll("\n", ", "))
      .on("pointerenter focus", (event, { text }) => tip(event.currentTarget, text))
      .on("pointerleave blur", () => { document.getElementById("tip").hidden = true; })
      .on("click", (_, { row }) => open(row))
      .on("keydown", (event, { row }) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (step) { event.preventDefault(); move(event.currentTarget, step); }
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(row); }
      });
    function move(from, step) { // to the next one that the filters leave
      const shown = nodes.filter(function () { return !this.hasAttribute("display"); }).nodes(), next = shown[shown.indexOf(from) + step];
      if (!next) return;
      nodes.attr("tabindex", (_, index, all) => (all[index] === next ? 0 : -1));
      next.focus();
    }
    return nodes;
  }
  function filterMarks(nodes, fits) { // they are hidden and shown, not drawn anew: thousands of them must not hold up the search
    nodes.attr("tabindex", -1).attr("display", "none").filter(({ row }) => fits(row)).attr("display", null).filter((_, index) => !index).attr("tabindex", 0);
  }
  function swatch(language, dash) { // of a legend
    const svg = d3.create("svg").attr("viewBox", "0 0 36 14").attr("aria-hidden", "true");
    if (dash !== undefined) svg.append("path").attr("class", `series ${language}`).attr("stroke-dasharray", dash).attr("d", "M0 7H36");
    svg.append("path").attr("class", language).attr("d", signOf(language)).attr("transform", "translate(18 7)");
    return svg.node();
  }
  /** The rate of each row over its flops a byte, below the roofs that `peak` (or undefined) has. */
  function roofline(label, rows, peak, { open, story }) {
    const work = rows.map((row) => ({ row, intensity: row.flops / row.bytes, rate: (row.flops / row.latency_us) * 1e6 }));
    const roofs = peak ? [["fp8", peak.float8_flops_per_s], ["bf16", peak.bfloat16_flops_per_s], ["fp32", peak.float32_flops_per_s]].filter(([, top]) => top) : [];
    const xs = padded(work.map((one) => one.intensity)), ys = padded([...work.map((one) => one.rate), ...roofs.map(([, top]) => top)]);
    for (const [, top] of roofs) xs[1] = Math.max(xs[1], (top / peak.copy_bytes_per_s) * 3);
    const { svg, x, y, end } = frame(label, { domain: xs, name: "flops a byte that must move", tick: (tick) => figure(tick) }, { domain: ys, name: "flops a second", tick: (tick) => unit(tick, "") });
    const roofLine = d3.line(([intensity]) => x(intensity), ([, rate]) => y(rate));
    let below = 0; // names of roofs that are close together are one under the other
    for (const [name, top] of roofs) {
      below = Math.max(y(top), below + 12);
      const bandwidth = peak.copy_bytes_per_s, start = Math.max(xs[0], ys[0] / bandwidth);
      svg.append("path").attr("class", "roof").attr("d", roofLine([[start, start * bandwidth], [top / bandwidth, top], [xs[1], top]]));
      svg.append("text").attr("x", end + 6).attr("y", below).attr("dy", "0.32em").text(name);
    }
    const nodes = addMarks(svg, work.map(({ row, intensity, rate }) => ({ row, x: x(intensity), y: y(rate), text: `${story(row)}\n${unit(rate, "flop/s")} at ${figure(intensity, 3)} flops a byte` })), open);
    return { svg: svg.node(), nodes, roofs };
  }
  /** Microseconds over bytes, a line for each solution; `lines` says of each its name, language and dashes. */
  function latency(label, rows, { open, story }) {
    const { svg, x, y } = frame(label, { domain: padded(rows.map((row) => row.bytes)), name: "bytes that a call must move", tick: (tick) => unit(tick, "B") },
      { domain: padded(rows.map((row) => row.latency_us)), name: "microseconds", tick: (tick) => figure(tick) });
    const through = d3.line((row) => x(row.bytes), (row) => y(row.latency_us)), drawn = {};
    const lines = [...d3.group(rows, (row) => row.solution)].sort(([one], [two]) => one.localeCompare(two)).map(([name, line]) => {
      const { language } = line[0];
      drawn[language] = (drawn[language] ?? -1) + 1;
      line.sort((one, two) => one.bytes - two.bytes || one.latency_us - two.latency_us);
      return { name, language, line, dash: DASHES[drawn[language] % DASHES.length] };
    });
    svg.append("g").selectAll("path").data(lines).join("path").attr("class", ({ language }) => `series ${language}`)
      .attr("stroke-dasharray", ({ dash }) => dash).attr("d", ({ line }) => through(line));
    svg.append("g").selectAll("line").data(rows).join("line").attr("class", ({ language }) => `series ${language}`)
      .attr("x1", (row) => x(row.bytes)).attr("x2", (row) => x(row.bytes)).attr("y1", (row) => y(row.ci_low_us)).attr("y2", (row) => y(row.ci_high_us));
    addMarks(svg, lines.flatMap(({ line }) => line.map((row) => ({ row, x: x(row.bytes), y: y(row.latency_us), text: story(row) }))), open);
    return { svg: svg.node(), lines };
  }
  /** Microseconds of one call in the order of the measurements, with intervals; a line for each config and tier. */
  function history(label, rows, { open, story }) {
    const day = new Map(rows.map((row) => [row.trace_id, row.timestamp.slice(0, 10)]));
    const { svg, x, y } = frame(label, { places: [...day.keys()], name: "measurements, oldest first", tick: (trace) => day.get(trace) },
      { domain: padded(rows.flatMap((row) => [row.ci_low_us, row.ci_high_us])), name: "microseconds", tick: (tick) => figure(tick) });
    const through = d3.line((row) => x(row.trace_id), (row) => y(row.latency_us));
    const lines = [...d3.group(rows, (row) => row.series)].map(([name, line], at) => ({ name, language: line[0].language, line, dash: DASHES[at % DASHES.length] }));
    svg.append("g").selectAll("path").data(lines).join("path").attr("class", ({ language }) => `series ${language}`)
      .attr("stroke-dasharray", ({ dash }) => dash).attr("d", ({ line }) => through(line));
    svg.append("g").selectAll("line").data(rows).join("line").attr("class", ({ language }) => `series ${language}`)
      .attr("x1", (row) => x(row.trace_id)).attr("x2", (row) => x(row.trace_id)).attr("y1", (row) => y(row.ci_low_us)).attr("y2", (row) => y(row.ci_high_us));
    addMarks(svg, rows.map((row) => ({ row, x: x(row.trace_id), y: y(row.latency_us), text: story(row) })), open);
    return { svg: svg.node(), lines };
  }
  /** A line for each family from its lowest to its highest ratio, with a mark at the median; to the right of 1 is faster than stock code. */
  function speedups(label, families) {
    const small = isSmall(), width = units(), [left, right] = small ? [116, 92] : [150, 190];
    const step = small ? 19 : 17, height = families.length * step + 30, floor = height - 26;
    const [least, most] = d3.extent([1, ...families.flatMap((one) => [one.low, one.high])]);
    const x = d3.scaleLog([least / 1.1, most * 1.1], [left, width - right]);
    const svg = d3.create("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("role", "img").attr("aria-label", label);
    const ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500].filter((tick) => tick >= least / 1.1 && tick <= most * 1.1);
    const grid = svg.append("g").attr("class", "axis").selectAll("g").data(ticks).join("g").attr("transform", (tick) => `translate(${x(tick)} 0)`);
    grid.append("line").attr("y1", 4).attr("y2", floor).classed("even", (tick) => tick === 1);
    const labelled = []; // as far as they do not touch, powers of ten first
    const roundness = (tick) => Math.abs(Math.log10(tick)) % 1;
    for (const tick of [...ticks].sort((a, b) => roundness(a) - roundness(b))) if (labelled.every((other) => Math.abs(x(other) - x(tick)) >= 38)) labelled.push(tick);
    grid.filter((tick) => labelled.includes(tick)).append("text").attr("y", height - 8).attr("text-anchor", "middle").text((tick) => `${tick}x`);
    const rows = svg.append("g").selectAll("g").data(families).join("g").attr("transform", (_, at) => `translate(0 ${at * step + 13})`);
    rows.append("text").attr("x", left - 10).attr("dy", "0.32em").attr("text-anchor", "end").text(({ name }) => name);
    rows.append("line").attr("class", "range").attr("x1", ({ low }) => x(low)).attr("x2", ({ high }) => x(high));
    rows.append("circle").attr("class", "middle").attr("r", 4.5).attr("cx", ({ middle }) => x(middle));
    rows.append("text").attr("x", width - right + 8).attr("dy", "0.32em").text(({ middle, count }) => (small ? `${figure(middle, 3)}x of ${count}` : `median ${figure(middle, 3)}x of ${count} shapes`));
    return svg.node();
  }
  return { figure, unit, roofline, latency, history, speedups, filterMarks, swatch };
})();
