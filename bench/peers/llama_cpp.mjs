// Runs a GGUF file in llama.cpp: a line of JSON with the work, then one with prompts for each run; a line of JSON answers each.
import readline from "node:readline";
import { pathToFileURL } from "node:url";

const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const next = async () => JSON.parse((await lines.next()).value ?? "null");  // null: there is no more work
const say = (answer) => process.stdout.write(JSON.stringify(answer) + "\n");

const work = await next();
const { getLlama } = await import(pathToFileURL(work.package).href);
const llama = await getLlama({ gpu: false, build: "never", logLevel: "error", maxThreads: work.threads });
const model = await llama.loadModel({ modelPath: work.model });
say({ ready: true });

async function answer(sequence, prompt, count, start) {
    const tokens = [], times = [];
    const options = { temperature: 0, yieldEogToken: true, contextShift: { size: 1 } };
    for await (const token of sequence.evaluate(prompt, options)) {
        tokens.push(token);
        times.push((performance.now() - start) / 1000);
        if (tokens.length === count) break;
    }
    return { tokens, times };
}

// A conversation: one sequence keeps its tokens, and reads of each prompt only what is new, as llama.cpp's server does.
async function turn(kept, { prompt, count }) {
    const start = performance.now();
    await kept.adaptStateToTokens(prompt, false);
    const cached = kept.nextTokenIndex;
    return { answers: [await answer(kept, prompt.slice(cached), count, start)], cached };
}

let kept = null;
for (let asked = await next(); asked; asked = await next()) {
    if (asked.room) {  // a new conversation
        await kept?.context.dispose();
        kept = (await model.createContext({ contextSize: asked.room, sequences: 1, threads: work.threads })).getSequence();
    }
    if (asked.prompt) {
        say(await turn(kept, asked));
        continue;
    }
    const { prompts, count } = asked;
    const size = Math.max(...prompts.map((prompt) => prompt.length)) + count + 1;
    const context = await model.createContext({
        contextSize: size, sequences: prompts.length, threads: work.threads,
    });
    const sequences = prompts.map(() => context.getSequence());
    const start = performance.now();
    const answers = await Promise.all(prompts.map((prompt, i) => answer(sequences[i], prompt, count, start)));
    say({ answers, seconds: (performance.now() - start) / 1000 });
    await context.dispose();
}
process.exit(0);  // its threads would keep it alive
