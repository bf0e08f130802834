// Walks through Prefect's page as a person does, and keeps the pictures of docs/ui.md: start with a changed learning rate,
// watch, cancel, retry, approve. Needs Chromium, and playwright-core beside this file or in NODE_PATH.
//   headway up --detach && node docs/make_screenshots.mjs .headway docs/images [lifecycle | approval]
// SLOWER=4 in the environment makes all waits four times as long, for a busy machine.
import fs from "fs";
import { createRequire } from "module";

const require = createRequire(process.env.NODE_PATH ? process.env.NODE_PATH + "/" : import.meta.url);
const { chromium } = require("playwright-core");
const [home, out, part] = process.argv.slice(2);
const slower = Number(process.env.SLOWER ?? 1);
const server = JSON.parse(fs.readFileSync(`${home}/prefect/server.json`));
const login = fs.readFileSync(`${home}/prefect/credentials`, "utf8").trim();
const headers = { Authorization: "Basic " + Buffer.from(login).toString("base64"), "Content-Type": "application/json" };

async function api(path, body) {
  const answer = await fetch(`${server.url}/api${path}`, { headers, method: body ? "POST" : "GET", body: body && JSON.stringify(body) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}

async function until(look, seconds) {
  for (const end = Date.now() + seconds * 1000 * slower; Date.now() < end; await new Promise((go) => setTimeout(go, 500))) {
    const found = await look();
    if (found) return found;
  }
  throw new Error(`not within ${seconds} s: ${look}`);
}

const state = async (run) => (await api(`/flow_runs/${run}`)).state;
const inState = (run, ...names) => until(async () => names.includes((await state(run)).name), 400);
const artifacts = (run, key) => api("/artifacts/filter", { artifacts: { key: { any_: [key] }, flow_run_id: { any_: [run] } }, sort: "CREATED_DESC" });
const training = (run) => until(async () => {
  const tasks = await api("/task_runs/filter", { flow_runs: { id: { any_: [run] } } });
  return tasks.some((task) => task.name.startsWith("train") && task.state_type === "RUNNING");
}, 300);

const seed = Math.floor(Date.now() / 1000) % 100000; // otherwise everything would be reused

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const page = await (await browser.newContext({ viewport: { width: 1280, height: 900 } })).newPage();
page.setDefaultTimeout(30000 * slower);
const pause = (milliseconds) => page.waitForTimeout(milliseconds * slower);
const shot = async (name) => { await pause(1500); await page.screenshot({ path: `${out}/prefect-${name}.png` }); };
const open = async (path) => { await page.goto(server.url + path); await pause(2500); };

// The login: the page asks once.
await open("/dashboard");
await shot("login");
await page.locator("input[type=password]").first().fill(login);
await page.keyboard.press("Enter");
await pause(2500);
await open("/deployments");
await shot("deployments");

// The first field of a label: the innermost property around it.
const field = (label) => page.locator(".schema-form-property__label", { hasText: new RegExp(`^${label}( \\(|$)`) }).first()
  .locator("xpath=ancestor::div[contains(concat(' ', @class, ' '), ' schema-form-property ')][1]");

async function start(fill, overrides, picture) {
  const deployment = await api("/deployments/name/retrain/tiny");
  const runs = async () => (await api("/flow_runs/filter", { sort: "EXPECTED_START_TIME_DESC", limit: 9 })).map((run) => run.id);
  const before = await runs();
  await open(`/deployments/deployment/${deployment.id}/run`);
  for (const [label, value] of fill) {
    const input = field(label).locator("input, textarea").first();
    await input.scrollIntoViewIfNeeded();
    await input.fill(String(value));
  }
  for (const [number, text] of overrides.entries()) {
    await field("overrides").getByRole("button", { name: "Add item" }).first().click();
    await field("overrides").locator("textarea, input").nth(number).fill(text);
  }
  if (picture) await shot(picture);
  await page.getByRole("button", { name: "Submit" }).first().click();
  return until(async () => (await runs()).find((id) => !before.includes(id)), 60);
}

async function lifecycle() {
  // Start with a changed learning rate, watch, cancel, retry from the stage that was stopped.
  const run = await start([["learning_rate", 0.003], ["steps", 400]],
    [`training.seed=${seed}`, "comparison.max_loss_to_champion=5"], "form");
  await training(run);
  await until(async () => (await artifacts(run, "progress-train")).length, 120);
  await open(`/runs/flow-run/${run}`);
  await shot("running");
  await page.getByText("Artifacts", { exact: true }).first().click();
  await page.setViewportSize({ width: 1280, height: 1500 });
  await shot("progress");
  await page.setViewportSize({ width: 1280, height: 900 });
  await page.getByRole("button", { name: "Cancel" }).first().click();
  await pause(800);
  await shot("cancel");
  await page.getByRole("button", { name: "Confirm" }).last().click();
  await inState(run, "Cancelled");
  await open(`/runs/flow-run/${run}`);
  await page.getByRole("button", { name: "Retry" }).first().click();
  await pause(800);
  await shot("retry");
  await page.locator(".p-modal").getByRole("button", { name: "Retry" }).click();
  await inState(run, "Completed");
  await open(`/runs/flow-run/${run}`);
  await shot("retried");
  await page.getByText("Artifacts", { exact: true }).first().click();
  await page.setViewportSize({ width: 1280, height: 1900 });
  await shot("artifacts");
  const [report] = await artifacts(run, "report");
  await open(`/artifacts/artifact/${report.id}`);
  await shot("report");
}

async function approval() {
  // A run that asks before it deploys.
  const asking = await start([],
    [`training.seed=${seed + 1}`, "comparison.max_loss_to_champion=5", "approval.before_deploy=true"]);
  await inState(asking, "Paused");
  await open(`/runs/flow-run/${asking}`);
  await page.getByRole("button", { name: "Resume" }).first().click();
  await pause(1500);
  await shot("approve");
  await field("Decision").locator(".p-select-button__control").focus();
  await page.keyboard.press("ArrowDown");
  await page.locator(".p-select-option", { hasText: /^approve$/ }).first().click();
  await field("Reason").locator("textarea, input").first().fill("better scores on the same text");
  await field("Your name").locator("textarea, input").first().fill("mara");
  await shot("answer");
  await page.getByRole("button", { name: "Submit" }).last().click();
  await inState(asking, "Completed");
}

if (part !== "approval") await lifecycle();
if (part !== "lifecycle") await approval();
await browser.close();
