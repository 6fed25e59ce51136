// What tilegym_db/report/plots.js and page.js call; esbuild leaves out the rest of each module.
export { extent, group } from "d3-array";
export { axisBottom, axisLeft } from "d3-axis";
export { format } from "d3-format";
export { scaleLog, scalePoint } from "d3-scale";
export { create, select } from "d3-selection";
export { line, symbol, symbolCircle, symbolDiamond2, symbolSquare, symbolTriangle } from "d3-shape";
