// Does the bench's work with workerpool for Node and one worker process.
//
// Reads one order from each line of standard input, and writes one JSON object for each order (see
// `bench/src/peers.rs`).

import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";
import process from "node:process";

const require = createRequire(process.cwd() + "/");
const workerpool = require("workerpool");
const own = fileURLToPath(import.meta.url);

if (process.env.PEER_WORKER) {
  workerpool.worker({ echo: (payload) => payload, die: () => process.kill(process.pid, "SIGKILL") });
} else {
  const pool = workerpool.pool(own, {
    workerType: "process",
    maxWorkers: 1,
    forkOpts: { env: { ...process.env, PEER_WORKER: "1" }, serialization: "advanced" },
  });
  const call = async (payload) => {
    const answer = await pool.exec("echo", [payload]);
    if (answer.length !== payload.length) throw new Error("too few bytes came back");
  };
  const median = (times) => times.sort((a, b) => a - b)[Math.floor(times.length / 2)];
  const orders = {
    async latency(size, total) {
      const [payload, times] = [Buffer.alloc(size, "x"), []];
      for (let count = 0; count < total; count++) {
        const began = performance.now();
        await call(payload);
        times.push(performance.now() - began);
      }
      return { us: median(times) * 1e3 };
    },
    async rate(lanes, size, total) {
      const payload = Buffer.alloc(size, "x");
      const began = performance.now();
      const lane = async () => {
        for (let count = 0; count < Math.floor(total / lanes); count++) await call(payload);
      };
      await Promise.all(Array.from({ length: lanes }, lane));
      return { rate: total / ((performance.now() - began) / 1e3) };
    },
    async recovery(total) {
      const times = [];
      for (let count = 0; count < total; count++) {
        const began = performance.now();
        await pool.exec("die", []).catch(() => {});
        for (;;) {
          try {
            await call(Buffer.alloc(64, "x"));
            break;
          } catch {
            // The pool starts another worker for the next request.
          }
        }
        times.push(performance.now() - began);
      }
      return { ms: median(times) };
    },
  };
  for await (const line of createInterface({ input: process.stdin })) {
    const [order, ...numbers] = line.split(" ");
    console.log(JSON.stringify(await orders[order](...numbers.map(Number))));
  }
  await pool.terminate(true);
}
