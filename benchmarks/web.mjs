// Times networks of bnncc and of ONNX Runtime Web in turns: web.mjs SETTINGS.json; see web.py.

import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const settings = JSON.parse(readFileSync(process.argv[2]));
const bytes = Uint8Array.from(readFileSync(settings.image));
const image = new Float32Array(bytes.buffer);
const require = createRequire(pathToFileURL(`${settings.modules}/x.js`));
const ort = await import(pathToFileURL(require.resolve("onnxruntime-web")));
const api = ort.default ?? ort;
api.env.wasm.numThreads = 1;

const runs = {};
for (const [name, path] of Object.entries(settings.ours)) {
  const { inputs, load, outputs } = await import(pathToFileURL(path));
  const network = await load(), [input] = Object.keys(inputs), [output] = Object.keys(outputs);
  runs[name] = async () => network.run({ [input]: image })[output];
}
for (const [name, path] of Object.entries(settings.theirs)) {
  const session = await api.InferenceSession.create(readFileSync(path), {
    executionProviders: ["wasm"], graphOptimizationLevel: "all",
  });
  const feeds = { [session.inputNames[0]]: new api.Tensor("float32", image, settings.shape) };
  runs[name] = async () => (await session.run(feeds))[session.outputNames[0]].data;
}

const seconds = {};
for (const [name, run] of Object.entries(runs)) {
  writeFileSync(`${settings.folder}/${name}.out`, Buffer.from(Float32Array.from(await run()).buffer));
  seconds[name] = [];
}
const warm = 10;
for (let round = 0; round < settings.repeat + warm; ++round) {
  for (const [name, run] of Object.entries(runs)) {
    const start = performance.now();
    await run();
    if (round >= warm) seconds[name].push((performance.now() - start) / 1000);
  }
}
const about = readFileSync(`${settings.modules}/onnxruntime-web/package.json`);
console.log(JSON.stringify({ seconds, version: JSON.parse(about).version, node: process.version, v8: process.versions.v8 }));
