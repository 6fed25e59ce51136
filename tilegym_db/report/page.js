"use strict";
// Everything is made with textContent and createElement: no text of a record is ever read as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const packed = Uint8Array.from(atob(data.sources), (letter) => letter.charCodeAt(0));
  const sources = (async () => new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json())();
  sources.catch(() => {}); // whoever opens a kernel is told
  const LANGUAGES = ["triton", "tilelang", "cutile", "python"];
  const AT_FIRST = 40; // rows of a table until one asks for all of them
  const { figure, unit } = plots;
  const byId = (id) => document.getElementById(id);

  const rowsOf = (table) => Array.from({ length: table.length }, (_, index) => {
    const row = {};
    table.columns.forEach((name, at) => {
      const value = table.values[at][index];
      row[name] = table.texts[name] ? table.texts[name][value] : value;
    });
    return row;
  });
  const rows = {};
  for (const name of ["evidence", "history", "coverage", "open", "changes", "definitions", "solutions", "peaks", "models"]) rows[name] = rowsOf(data[name]);
  const families = new Map(rows.definitions.map((row) => [row.name, row.op_type]));
  const languages = new Map(rows.solutions.map((row) => [row.name, row.language]));
  const evidenceOf = d3.group(rows.evidence, (row) => row.solution);
  const caseOf = (row) => [row.solution, row.gpu, row.axes_key, row.dtypes_key, row.scalars_key, row.layouts_key].join("|");
  const historyOf = d3.group(rows.history, caseOf);

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) name === "onclick" ? node.addEventListener("click", value) : node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  const compare = (key) => (one, two) => {
    const [a, b] = [one[key], two[key]];
    if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
    if (b === null || b === undefined) return -1;
    return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  };
  const percent = (value) => value === null || value === undefined ? "" : `${(value * 100).toFixed(value < 0.1 ? 1 : 0)}%`;
  const times = (value) => value === null || value === undefined ? "" : value < 100 ? value.toFixed(2) : figure(value);
  const shape = (row) => [row.axes_key, row.scalars_key, row.layouts_key].filter(Boolean).join("; ").replaceAll(",", " ");
  const shapeCell = (row, ...before) => { // sizes in full; settings short and set back, since the command of the case has them whole
    const rest = [...before, row.scalars_key, row.layouts_key].filter(Boolean).join("; ").replaceAll(",", " ").replace(/\d+\.\d{6,}/g, (digits) => figure(Number(digits), 4));
    return element("span", {}, row.axes_key.replaceAll(",", " "), ...(rest ? [element("span", { class: "interval" }, ` ${rest}`)] : []));
  };

  // --- state: what the address says after '#', so that a filtered page can be sent to somebody ---
  const FIELDS = ["q", "op", "operator", "gpu", "lang", "since"];
  const parts = [...document.querySelectorAll("main section")].map((section) => section.id);
  function addressState() {
    const text = location.hash.slice(1);
    return new URLSearchParams(parts.includes(text) ? "" : text);
  }
  function readAddress() {
    if (parts.includes(location.hash.slice(1))) return;
    const state = addressState();
    for (const id of FIELDS) byId(id).value = state.get(id) ?? "";
    byId("fastest").checked = state.get("fastest") === "1";
    apply({ atOnce: true });
    const kernel = state.get("kernel");
    if (kernel) openDetail(kernel, state.get("trace"));
    else if (byId("detail").open) byId("detail").close();
  }
  function writeAddress(extra = {}) {
    const state = new URLSearchParams();
    for (const id of FIELDS) if (byId(id).value) state.set(id, byId(id).value);
    if (byId("fastest").checked) state.set("fastest", "1");
    for (const [name, value] of Object.entries(extra)) if (value) state.set(name, value);
    history.replaceState(null, "", `#${state}`);
  }

  // --- tables ---
  const breakable = (text) => text.split(/(?<=_)/).flatMap((part, at) => (at ? [element("wbr"), part] : [part])); // on paper a long name may go on below after a _
  const kernelLink = (name, trace, operator) => { // beside its operator, a kernel goes by what follows that name
    const text = operator && name.startsWith(`${operator}_`) ? name.slice(operator.length + 1) : name;
    return element("button", { type: "button", class: "link", ...(text === name ? {} : { "aria-label": name, title: name }), onclick: () => openDetail(name, trace) }, ...breakable(text));
  };
  const time = (row) => element("span", {}, figure(row.latency_us), element("span", { class: "interval" }, ` [${figure(row.ci_low_us)}, ${figure(row.ci_high_us)}]`));
  const OPERATOR = { key: "definition", label: "operator", show: (row) => breakable(row.definition) };
  const TEXT = (key, label) => ({ key, label });
  const NUMBER = (key, label, digits = 4) => ({ key, label, number: true, show: (row) => figure(row[key], digits) });
  const KERNEL = { key: "solution", label: "kernel", show: (row) => (row.solution ? kernelLink(row.solution, row.trace_id) : "") };
  const MEASURED = [
    { key: "latency_us", label: "us [interval]", number: true, show: time },
    { key: "speedup", label: "speedup", number: true, show: (row) => times(row.speedup) },
    { key: "sol_ratio", label: "SOL", number: true, show: (row) => percent(row.sol_ratio) },
  ];
  const SHAPE = { key: "axes_key", label: "shape", show: (row) => shapeCell(row) };
  const gpuNames = [...new Set(rows.evidence.map((row) => row.gpu))].sort();
  // One row a shape that is verified on two GPUs or more: the fastest of all languages (among ""), and of each language.
  function sideBySide() {
    const found = [], keyOf = (row) => [row.definition, row.axes_key, row.dtypes_key, row.scalars_key, row.layouts_key].join("|");
    const withKernel = new Set(rows.evidence.filter((row) => row.role === "kernel").map((row) => `${row.gpu}|${keyOf(row)}`));
    for (const among of ["", ...LANGUAGES]) {
      const fastest = rows.evidence.filter((row) => (among ? row.is_fastest_in_language && row.language === among : row.is_fastest));
      for (const cases of d3.group(fastest, keyOf).values()) {
        if (cases.length < 2) continue;
        cases.sort((one, two) => (one.gpu < two.gpu ? -1 : 1));
        const { definition, op_type, axes_key, dtypes_key, scalars_key, layouts_key } = cases[0], spent = cases.map((row) => row.latency_us);
        const row = { definition, op_type, axes_key, dtypes_key, scalars_key, layouts_key, among };
        const without = among ? [] : cases.map((one) => one.gpu).filter((gpu) => !withKernel.has(`${gpu}|${keyOf(row)}`));
        if (without.length && without.length < cases.length) row.agree = `none on ${without.join(", ")}`; // stock code against a kernel says nothing of the GPUs
        else {
          row.agree = cases.every((one) => one.solution === cases[0].solution) ? "same" : "differs";
          row.ratio = gpuNames.length === 2 ? spent[0] / spent[1] : Math.max(...spent) / Math.min(...spent);
        }
        for (const one of cases) Object.assign(row, { [`us ${one.gpu}`]: one.latency_us, [`sol ${one.gpu}`]: one.sol_ratio, [`kernel ${one.gpu}`]: one.solution, [`trace ${one.gpu}`]: one.trace_id });
        found.push(row);
      }
    }
    return found.sort((one, two) => compare("definition")(one, two) || compare("axes_key")(one, two));
  }
  const aside = (text) => (text ? element("span", { class: "interval" }, ` ${text}`) : "");
  // One row a way of running a model, with what stock code reached in the same rounds beside it.
  function besideStock() {
    const stock = new Map(rows.models.filter((row) => row.way === "stock").map((row) => [row.run_id, row]));
    return rows.models.filter((row) => !["stock", "stock_again"].includes(row.way)).map((row) => ({
      ...row, call: (row.batch * 1e7 + row.prompt_tokens) * 1e7 + row.new_tokens, stock_tokens_per_s: stock.get(row.run_id)?.tokens_per_s,
      proved: row.proved && row.way === "patched", ...(row.claim === "nothing" ? { claim: "none", speedup: null } : {}), // where nothing may be claimed no figure is
    }));
  }
  const tables = {
    kernels: {
      rows: rows.evidence.filter((row) => row.is_fastest_in_language), empty: "Nothing is verified in this database yet. Try: tilegym-db bench --verify",
      keep: (row) => !byId("fastest").checked || row.is_fastest,
      columns: [OPERATOR, SHAPE, TEXT("dtypes_key", "dtypes"), TEXT("gpu", "GPU"),
        TEXT("language", "language"), KERNEL, { ...TEXT("config_key", "config"), optional: true }, ...MEASURED],
    },
    gpus: {
      rows: sideBySide(), empty: "No shape is verified on two GPUs in this database.", keep: (row) => row.among === byId("lang").value,
      columns: [OPERATOR, { ...SHAPE, show: (row) => shapeCell(row, row.dtypes_key) },
        ...gpuNames.flatMap((gpu) => [
          { key: `us ${gpu}`, label: "us", group: gpu, number: true, show: (row) => figure(row[`us ${gpu}`]) },
          { key: `sol ${gpu}`, label: "SOL", group: gpu, number: true, show: (row) => percent(row[`sol ${gpu}`]) },
          { key: `kernel ${gpu}`, label: "fastest", group: gpu, show: (row) => (row[`kernel ${gpu}`] ? kernelLink(row[`kernel ${gpu}`], row[`trace ${gpu}`], row.definition) : "") },
        ]),
        { key: "ratio", label: gpuNames.length === 2 ? `${gpuNames[0]} / ${gpuNames[1]}` : "slowest / fastest", number: true, show: (row) => times(row.ratio) },
        { key: "agree", label: "kernel", show: (row) => element("span", { class: row.agree === "differs" ? "" : "none" }, row.agree) }],
    },
    coverage: {
      rows: rows.coverage, empty: "No GPU has any measurement in this database.", render: coverage, columns: [],
    },
    models: {
      rows: besideStock(), empty: "This database holds no run of a whole model. Try: tilegym-db model bench CONFIG",
      columns: [{ key: "model", label: "model", show: (row) => [element("span", { class: "whole" }, row.model), aside(`${row.layers} layers`)] }, TEXT("gpu", "GPU"),
        { key: "call", label: "call", show: (row) => `${row.batch} x ${row.prompt_tokens}${row.new_tokens ? ` + ${row.new_tokens}` : ""}` },
        { key: "way", label: "way", show: (row) => (row.library ? element("span", { title: row.library }, row.way) : row.way.replaceAll("_", " ")) },
        NUMBER("ttft_ms", "ms to\u00a0first"), { ...NUMBER("tpot_ms", "ms a token"), optional: true }, NUMBER("tokens_per_s", "tokens/s"), NUMBER("stock_tokens_per_s", "stock tokens/s"),
        { key: "speedup", label: "speedup [interval]", number: true, show: (row) => [times(row.speedup), row.speedup && row.speedup_ci_low ? aside(`[${times(row.speedup_ci_low)}, ${times(row.speedup_ci_high)}]`) : ""] },
        { key: "gpu_share", label: "served", number: true, optional: true, show: (row) => percent(row.gpu_share) },
        { key: "claim", label: "claim", show: (row) => [row.claim ?? "", aside([row.reason, row.proved ? "proved on this model" : ""].filter(Boolean).join("; "))] }, TEXT("day", "day")],
    },
    open: {
      rows: rows.open, empty: "Nothing is open.",
      columns: [TEXT("kind", "what"), OPERATOR, KERNEL, TEXT("gpu", "GPU"), { key: "cases", label: "cases", number: true, show: (row) => String(row.cases || "") }],
    },
    changes: {
      rows: rows.changes, empty: "This database holds no award, revocation or regression.", keep: (row) => row.day >= sinceDay(),
      columns: [TEXT("day", "day"), TEXT("kind", "what"), OPERATOR, KERNEL, TEXT("gpu", "GPU"), NUMBER("cases", "cases"), { ...NUMBER("ratio", "times slower", 3), optional: true }],
    },
    solutions: {
      rows: rows.solutions.map((row) => ({ ...row, solution: row.name, verified: evidenceOf.get(row.name)?.length ?? 0 })), empty: "The catalog has no solution.",
      columns: [KERNEL, OPERATOR, TEXT("language", "language"), TEXT("role", "role"), NUMBER("verified", "cases"), TEXT("author", "author"), TEXT("description", "description")],
    },
  };
  const newest = rows.changes.reduce((last, row) => (row.day > last ? row.day : last), "");
  function sinceDay() {
    if (byId("since").value || !newest) return byId("since").value;
    return new Date(Date.parse(newest) - 7 * 864e5).toISOString().slice(0, 10);
  }
  for (const table of Object.values(tables)) {
    for (const row of table.rows) {
      row.family = row.op_type ?? families.get(row.definition) ?? "";
      row.tongue = row.language ?? languages.get(row.solution) ?? "";
      row.words = Object.entries(row).filter(([key, value]) => typeof value === "string" && key !== "command" && key !== "libs").map(([, value]) => value).join("\n").toLowerCase();
    }
  }
  function wanted() {
    const words = byId("q").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [op, operator, gpu, lang] = ["op", "operator", "gpu", "lang"].map((id) => byId(id).value);
    return (row) => (!op || !row.family || row.family === op) && (!operator || !row.definition || row.definition === operator) && (!gpu || !row.gpu || row.gpu === gpu)
      && (!lang || !row.tongue || row.tongue === lang) && words.every((word) => row.words.includes(word));
  }
  function show(name) {
    const table = tables[name], place = byId(`table-${name}`), keep = table.keep ?? (() => true), fits = wanted();
    table.found = table.rows.filter((row) => fits(row) && keep(row));
    if (table.sorted) {
      table.found.sort(compare(table.sorted.key));
      if (table.sorted.down) table.found.reverse();
    }
    if (!table.found.length) {
      place.replaceChildren(element("p", { class: "notice" }, table.rows.length ? "Nothing fits these filters." : table.empty));
      return;
    }
    if (table.render) { place.replaceChildren(...table.render(table.found)); return; }
    const some = table.all ? table.found : table.found.slice(0, AT_FIRST);
    const columns = table.columns.filter((column) => !column.optional || table.found.some((row) => row[column.key] || row[column.key] === 0));
    place.replaceChildren(element("table", {}, element("thead", {}, ...groupRow(columns), element("tr", {}, ...columns.map((column) => heading(name, column)))),
      element("tbody", {}, ...some.map((row) => element("tr", {}, ...columns.map((column) => cell(row, column)))))));
    if (some.length < table.found.length) {
      place.append(element("button", { type: "button", class: "more", onclick: () => { table.all = true; show(name); } }, `Show all ${table.found.length} rows`));
    }
  }
  function groupRow(columns) { // the row above the heads that names what some of them are of, where any has such a name
    if (!columns.some((column) => column.group)) return [];
    const runs = [];
    for (const { group } of columns) runs.length && runs.at(-1).group === group ? runs.at(-1).length += 1 : runs.push({ group, length: 1 });
    return [element("tr", { class: "groups" }, ...runs.map(({ group, length }) => element(group ? "th" : "td", { colspan: length, ...(group ? { scope: "colgroup", class: "first" } : {}) }, group ?? "")))];
  }
  const fullLabel = (column) => (column.group ? `${column.label} ${column.group}` : column.label);
  function heading(name, column) {
    const { sorted } = tables[name];
    const direction = sorted?.key === column.key ? (sorted.down ? "descending" : "ascending") : "none";
    const sort = () => {
      tables[name].sorted = { key: column.key, down: direction === "ascending" };
      show(name);
      byId(`table-${name}`).querySelector(`th[data-key="${column.key}"] button`).focus();
    };
    return element("th", { scope: "col", "aria-sort": direction, "data-key": column.key, ...(column.number ? { class: "number" } : {}) },
      element("button", { type: "button", onclick: sort, ...(column.group ? { "aria-label": fullLabel(column), "data-group": column.group } : {}) }, column.label));
  }
  const KINDS = { gpu: "whole", day: "whole", call: "whole", author: "whole", claim: "reason", description: "prose" }; // whole: in one line
  function cell(row, column) {
    const content = column.show ? column.show(row) : row[column.key] ?? "";
    const kind = column.number ? "number" : KINDS[column.key];
    return element("td", { "data-label": fullLabel(column), ...(kind ? { class: kind } : {}) }, Array.isArray(content) ? element("span", {}, ...content) : content);
  }
  function coverage(found) {
    const places = [...new Set(found.map((row) => row.gpu))].sort();
    const tongues = LANGUAGES.filter((language) => found.some((row) => row.language === language));
    const heads = tongues.flatMap((language) => places.map((gpu) => [gpu, language])); // the GPUs of a language side by side
    const { sorted } = tables.coverage;
    const groups = [...d3.group(found, (row) => row.definition)].map(([name, cells]) => {
      const line = { operator: name, family: cells[0].op_type, cells: {} };
      for (const one of cells) { line.cells[`${one.gpu} ${one.language}`] = one; line[`${one.gpu} ${one.language}`] = one.verified; }
      return line;
    });
    if (sorted) { groups.sort(compare(sorted.key)); if (sorted.down) groups.reverse(); }
    const word = (one) => !one ? "" : one.verified ? `${one.verified} / ${one.workloads}` : one.solutions ? "unverified" : "none";
    const tone = (one) => !one || !one.verified ? "none" : one.verified >= one.workloads ? "full" : "some";
    const edge = (gpu) => (gpu === places[0] ? " first" : "");
    const named = (cells) => new Set(cells.filter((one) => one.verified).map((one) => one.definition)).size;
    const summary = places.map((gpu) => {
      const here = found.filter((row) => row.gpu === gpu);
      return element("li", {}, element("strong", {}, gpu), ` ${named(here)} of ${groups.length} operators verified: `
        + tongues.map((language) => `${language} ${named(here.filter((row) => row.language === language))}`).join(", "));
    });
    const columns = [TEXT("operator", "operator"), TEXT("family", "family"), ...heads.map(([gpu, language]) => ({ key: `${gpu} ${language}`, label: gpu, group: language }))];
    const table = element("table", { class: "map" },
      element("thead", {}, ...groupRow(columns), element("tr", {}, ...columns.map((column) => heading("coverage", column)))),
      element("tbody", {}, ...groups.map((line) => element("tr", {}, element("td", { "data-label": "operator" }, ...breakable(line.operator)), element("td", { "data-label": "family" }, line.family),
        ...heads.map(([gpu, language]) => {
          const one = line.cells[`${gpu} ${language}`];
          return element("td", { class: tone(one) + edge(gpu), "data-label": `${language} ${gpu}` }, word(one));
        })))));
    table.style.setProperty("--beside", Math.min(places.length, 2));
    return [element("ul", { class: "summary" }, ...summary), table];
  }

  // --- plots ---
  const story = (row) => `${row.solution} (${row.language})\n${row.definition} ${shape(row)} ${row.dtypes_key} on ${row.gpu}\n${figure(row.latency_us, 7)} us [${figure(row.ci_low_us, 7)}, ${figure(row.ci_high_us, 7)}], ${percent(row.sol_ratio)} of the speed of light`;
  const ofMarks = { story, open: (row) => openDetail(row.solution, row.trace_id) };
  let roofMarks;
  function filterRoofline() { if (roofMarks) plots.filterMarks(roofMarks, wanted()); }
  function roofline() {
    const place = byId("plot-roofline"), gpu = byId("roof-gpu").value, peak = rows.peaks.find((row) => row.gpu === gpu);
    const points = tables.kernels.rows.filter((row) => row.gpu === gpu && row.is_fastest && row.flops > 0 && row.bytes > 0);
    roofMarks = undefined;
    if (!points.length) { place.replaceChildren(element("p", { class: "notice" }, "No measured kernel of this GPU has a cost model.")); return; }
    const { svg, nodes, roofs } = plots.roofline(`Roofline of ${gpu}: ${points.length} shapes`, points, peak, ofMarks);
    roofMarks = nodes;
    const seen = LANGUAGES.filter((language) => points.some((row) => row.language === language));
    place.replaceChildren(svg, element("ul", { class: "legend" }, element("li", { class: "paper" }, gpu), ...seen.map((language) => element("li", {}, plots.swatch(language), ` ${language}`)),
      element("li", {}, peak ? `roofs: ${roofs.map(([name, top]) => `${name} ${unit(top, "flop/s")}`).join(", ")}; slope ${unit(peak.copy_bytes_per_s, "B/s")}; calibrated on ${peak.gpu_name}` : "this GPU was not calibrated: no roof")));
    filterRoofline();
  }
  function overview() { // of each shape the fastest kernel, whether it beats stock code or not
    const place = byId("plot-speedups"), cases = new Map();
    for (const row of tables.kernels.rows.filter(wanted())) {
      if (row.role !== "kernel" || row.speedup === null) continue;
      const key = [row.definition, row.gpu, row.axes_key, row.dtypes_key, row.scalars_key, row.layouts_key].join("|"), known = cases.get(key);
      if (!known || row.latency_us < known.latency_us) cases.set(key, row);
    }
    const found = [...d3.group(cases.values(), (row) => row.family)].map(([name, group]) => {
      const ratios = group.map((row) => row.speedup).sort((one, two) => one - two), half = (ratios.length - 1) / 2;
      return { name, count: ratios.length, low: ratios[0], middle: (ratios[Math.floor(half)] + ratios[Math.ceil(half)]) / 2, high: ratios.at(-1) };
    }).sort((one, two) => two.middle - one.middle);
    const said = found.map(({ name, middle, low, high, count }) => `${name} ${figure(middle, 3)}x, from ${figure(low, 3)} to ${figure(high, 3)}, of ${count} shapes`).join("; ");
    place.replaceChildren(found.length ? plots.speedups(`Median speedup of each family: ${said}`, found) : element("p", { class: "notice" }, "No kernel that these filters leave was timed beside stock code."));
  }
  const latencyKey = (row) => [row.gpu, row.dtypes_key, row.layouts_key, row.scalars_key].filter(Boolean).join("; ");
  function latency() {
    const place = byId("plot-latency"), all = rows.evidence.filter((row) => row.definition === byId("lat-definition").value);
    const keys = [...d3.group(all, latencyKey)].sort((one, two) => two[1].length - one[1].length).map(([key]) => key);
    const chosen = byId("gpu").value, fitting = chosen ? keys.filter((key) => key.startsWith(`${chosen};`)) : keys;
    fill("lat-key", keys, fitting.includes(byId("lat-key").value) ? byId("lat-key").value : fitting[0] ?? keys[0]);
    const points = all.filter((row) => latencyKey(row) === byId("lat-key").value && row.bytes > 0);
    if (!points.length) { place.replaceChildren(element("p", { class: "notice" }, "This operator has no measurement with a cost model.")); return; }
    const { svg, lines } = plots.latency(`Latency of ${byId("lat-definition").value} by size`, points, ofMarks);
    place.replaceChildren(svg, element("ul", { class: "legend" }, element("li", { class: "paper" }, `${byId("lat-definition").value}, ${byId("lat-key").value}`), ...lines.map(({ name, language, dash }) => element("li", {}, plots.swatch(language, dash), " ", kernelLink(name)))));
  }
  function followSearch() { // the plot is of one operator: of one that the search shows
    const shown = distinct(tables.kernels.found.map((row) => row.definition)), chosen = byId("lat-definition"), words = byId("q").value.trim();
    const gpu = byId("gpu").value, isOther = gpu && !byId("lat-key").value.startsWith(`${gpu};`);
    if (!shown.length || (shown.includes(chosen.value) && !isOther)) return;
    if (!shown.includes(chosen.value)) chosen.value = shown.includes(words) ? words : shown[0];
    latency();
  }
  function followGpu() { // the roofline is of one GPU: of the one that the filter names
    const gpu = byId("gpu").value, roof = byId("roof-gpu");
    if (!gpu || roof.value === gpu || ![...roof.options].some((one) => one.value === gpu)) return;
    roof.value = gpu;
    roofline();
  }

  // --- one kernel ---
  // A page from disk may have no clipboard; then the selected text is copied the old way.
  async function copyText(node) {
    try {
      await navigator.clipboard.writeText(node.textContent);
      return true;
    } catch {
      getSelection().selectAllChildren(node);
      return document.execCommand("copy");
    }
  }
  function withCopy(heading, node, what) {
    const button = element("button", { type: "button", class: "copy", "aria-label": `Copy ${what}` }, "Copy");
    button.addEventListener("click", async () => {
      button.textContent = (await copyText(node)) ? "Copied" : "Selected: press Ctrl-C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    return element("div", { class: "headed" }, heading, button);
  }
  function openDetail(name, trace) {
    const solution = rows.solutions.find((row) => row.name === name), dialog = byId("detail"), body = byId("detail-body");
    const evidence = evidenceOf.get(name) ?? [], row = evidence.find((one) => one.trace_id === trace) ?? evidence[0];
    const close = element("button", { type: "button", class: "close", onclick: () => dialog.close() }, "Close");
    body.replaceChildren(close, element("h2", { id: "detail-title" }, name));
    if (solution) body.append(element("p", {}, `${solution.language} ${solution.role} for ${solution.definition}, by ${solution.author}. ${solution.description}`));
    else body.append(element("p", { class: "notice" }, "The catalog has no solution of this name."));
    if (row) body.append(...evidenceNodes(row, evidence));
    else body.append(element("p", { class: "notice" }, "Not verified on any GPU."));
    for (const [path, digest] of data.files[name] ?? []) {
      const text = element("pre", { tabindex: 0, "aria-label": `source ${path}` });
      sources.then((texts) => { text.textContent = texts[digest]; }, () => { text.textContent = "This browser is too old to unpack the sources."; });
      body.append(withCopy(element("h3", {}, path), text, `the source ${path}`), text);
    }
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
    writeAddress({ kernel: name, trace: row?.trace_id });
  }
  function evidenceNodes(row, evidence) {
    const cases = element("select", { id: "cases" }, ...evidence.map((one) => element("option", { value: one.trace_id }, `${one.gpu}: ${shape(one)} ${one.dtypes_key}`)));
    cases.value = row.trace_id;
    cases.addEventListener("change", () => { openDetail(row.solution, cases.value); byId("cases").focus(); });
    const facts = [
      ["verdict", `PASSED, tier ${row.tier}, sandbox level ${row.sandbox_level}${row.sandbox_level < 2 ? " (not confined: for this user alone)" : ""}, ${row.origin}`], ["case", `${row.definition} ${shape(row)} ${row.dtypes_key}`],
      ["config", row.config_key || "the source's own defaults"], ["GPU", `${row.gpu_name}, driver ${row.driver}, ${row.clock_mhz ?? "?"} MHz`], ["software", row.libs],
      ["time", `${figure(row.latency_us, 7)} us [${figure(row.ci_low_us, 7)}, ${figure(row.ci_high_us, 7)}], ${row.samples} samples, timer ${row.timer}`],
      ["against stock", row.speedup === null ? "not compared" : `${figure(row.speedup)}x, at least ${figure(row.speedup_ci_low)}x`],
      ["kernel time", row.profiled_us === null ? "not known" : `${figure(row.profiled_us)} us by the clock of the kernels, without launches`],
      ["strongest baseline", row.strongest_baseline === null ? "not known" : `${row.strongest_baseline}, ${times(row.strongest_ratio)} of this time`],
      ["speed of light", row.sol_us === null ? "not known" : `${percent(row.sol_ratio)}; ${figure(row.sol_us)} us`],
      ["correctness", `${row.cases} cases; relative error ${figure(row.rel_fro, 3)}, largest ${figure(row.max_abs, 3)}`],
      ["fuzzing", row.envelope_digest ? `${row.envelope_cases} fuzz cases, ${row.envelope_digest}` : "none"], ["trace", row.trace_id], ["measured", row.timestamp],
    ];
    const command = element("pre", { class: "command", tabindex: 0 }, row.command);
    const measured = (historyOf.get(caseOf(row)) ?? []).map((one) => ({ ...one, language: row.language, series: `${one.config_key || "the source's own defaults"}, ${one.tier}` }));
    return [evidence.length > 1 ? element("label", { class: "check" }, `One of ${evidence.length} verified cases: `, cases) : element("p", { class: "muted" }, "The only verified case of this solution."),
      element("dl", {}, ...facts.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text ?? "")])),
      withCopy(element("h3", {}, "Reproduce"), command, "the command"), command, ...historyNodes(measured)];
  }
  function historyNodes(measured) { // of a case that was timed more than once
    if (!measured.length) return [];
    const ago = (one) => (one.change === null ? "" : `${times(one.ratio)}x the time before: ${one.change}`), source = (one) => (one.is_current ? "current" : "older");
    const story = (one) => `${one.timestamp}: ${figure(one.latency_us, 7)} us [${figure(one.ci_low_us, 7)}, ${figure(one.ci_high_us, 7)}]\n${[one.series, ago(one), `${source(one)} source`].filter(Boolean).join("\n")}`;
    const lines = new Map(measured.map((one) => [one.trace_id, element("tr", { tabindex: -1 }, ...[one.timestamp, time(one), ago(one), one.series, source(one), one.driver, one.trace_id]
      .map((content, at) => element("td", at === 1 ? { class: "number" } : {}, content ?? "")))]));
    const { svg, lines: drawn } = plots.history(`Time of ${measured[0].solution} over ${measured.length} measurements`, measured, { story, open: (one) => lines.get(one.trace_id).focus() });
    const heads = ["measured", "us [interval]", "change", "config, tier", "source", "driver", "trace"];
    return [element("h3", { id: "history" }, "History"),
      element("p", { class: "muted" }, "Every timed pass of this case, oldest first. A hollow mark is of an older source. slower, faster: the intervals lie apart. Drivers and hosts may differ, so compare sources with tilegym-db regress."),
      element("div", { class: "plot", id: "plot-history" }, svg, element("ul", { class: "legend" }, ...drawn.map(({ name, language, dash }) => element("li", {}, plots.swatch(language, dash), ` ${name}`)))),
      element("div", { class: "table" }, element("table", { id: "table-history" }, element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), element("tbody", {}, ...lines.values())))];
  }

  // --- controls ---
  function fill(id, values, chosen, all) {
    byId(id).replaceChildren(...(all ? [element("option", { value: "" }, all)] : []), ...values.map((value) => element("option", { value }, value)));
    if (chosen !== undefined) byId(id).value = chosen;
  }
  const distinct = (items) => [...new Set(items)].filter(Boolean).sort();
  let applied = 0;
  function apply({ atOnce = false } = {}) {
    const mine = ++applied, rest = [...Object.keys(tables).filter((name) => name !== "kernels").map((name) => () => show(name)), followGpu, filterRoofline, followSearch];
    rest.unshift(overview);
    show("kernels");
    byId("since-shown").textContent = sinceDay() || "the start";
    const { found, rows: all } = tables.kernels;
    byId("status").textContent = `${found.length} of ${all.length} kernel rows`;
    // The other parts follow, each in a task of its own, so that whoever types waits for the first table only.
    const next = () => {
      if (mine !== applied || !rest.length) return;
      rest.shift()();
      setTimeout(next);
    };
    if (atOnce) rest.forEach((part) => part());
    else setTimeout(next);
  }
  function changed() { writeAddress(); apply(); }
  const places = distinct(rows.coverage.map((row) => row.gpu));
  fill("op", distinct(rows.definitions.map((row) => row.op_type)), "", "all");
  fill("gpu", places, "", "all");
  fill("lang", LANGUAGES, "", "all");
  fill("operator", distinct(rows.definitions.map((row) => row.name)), "", "all");
  fill("operators", distinct(rows.definitions.map((row) => row.name)));
  fill("roof-gpu", gpuNames, [...d3.group(rows.evidence, (row) => row.gpu)].reduce((most, one) => (one[1].length > most[1].length ? one : most), ["", []])[0]);
  fill("lat-definition", distinct(rows.evidence.map((row) => row.definition)));
  byId("filters").addEventListener("input", changed);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("filters").addEventListener("reset", () => setTimeout(changed));
  byId("fastest").addEventListener("change", changed);
  byId("roof-gpu").addEventListener("change", roofline);
  for (const id of ["lat-definition", "lat-key"]) byId(id).addEventListener("change", latency);
  byId("detail").addEventListener("close", () => writeAddress());
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) { event.preventDefault(); byId("q").focus(); }
  });
  addEventListener("hashchange", readAddress);
  const drawPlots = () => { overview(); latency(); roofline(); };
  matchMedia("(max-width: 46rem)").addEventListener("change", drawPlots);
  const watcher = new ResizeObserver((seen) => { // a table that is wider than the page scrolls by itself, without a sticky head
    for (const { target } of seen) target.classList.toggle("scrolled", target.scrollWidth > target.clientWidth);
  });
  document.querySelectorAll("main .table").forEach((place) => watcher.observe(place));
  const bar = byId("filters");
  new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${bar.offsetHeight}px`)).observe(bar);
  drawPlots();
  readAddress();
  if (parts.includes(location.hash.slice(1))) apply({ atOnce: true });
})();
