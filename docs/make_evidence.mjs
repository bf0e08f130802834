// Approves a retraining that waits, in Prefect's page as a person does, and says as one JSON object what stood beside the form.
// Needs Chromium, and playwright-core beside this file or in NODE_PATH. With OUT it keeps pictures: the approval, and the pages
// of evidence that are named after it, light and dark. tests/integration/flows/test_never_alone.py runs it, and so makes docs/revalidation.md's.
//   node docs/make_evidence.mjs .headway FLOW_RUN NAME REASON [OUT [evidence.html]]
import fs from "fs";
import { createRequire } from "module";

const require = createRequire(process.env.NODE_PATH ? process.env.NODE_PATH + "/" : import.meta.url);
const { chromium } = require("playwright-core");
const [home, run, name, reason, out, evidence] = process.argv.slice(2);
const server = JSON.parse(fs.readFileSync(`${home}/prefect/server.json`));
const login = fs.readFileSync(`${home}/prefect/credentials`, "utf8").trim();

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const page = await (await browser.newContext({ viewport: { width: 1280, height: 900 } })).newPage();
page.setDefaultTimeout(60000);
const keep = async (picture, options = {}) => { if (out) await page.screenshot({ path: `${out}/${picture}.png`, ...options }); };
const field = (label) => page.locator(".schema-form-property__label", { hasText: new RegExp(`^${label}( \\(|$)`) }).first()
  .locator("xpath=ancestor::div[contains(concat(' ', @class, ' '), ' schema-form-property ')][1]");

await page.goto(`${server.url}/dashboard`);
await page.locator("input[type=password]").first().fill(login);
await page.keyboard.press("Enter");
await page.waitForTimeout(2000);
await page.goto(`${server.url}/runs/flow-run/${run}`);
await page.getByRole("button", { name: "Resume" }).first().click();
await field("Decision").waitFor();
const beside = await page.locator(".p-modal").innerText();
await page.setViewportSize({ width: 1280, height: 1700 });
await page.waitForTimeout(500);
await keep("prefect-retrain-approval");
await field("Decision").locator(".p-select-button__control").focus();
await page.keyboard.press("ArrowDown");
await page.locator(".p-select-option", { hasText: /^approve$/ }).first().click();
await field("Reason").locator("textarea, input").first().fill(reason);
await field("Your name").locator("textarea, input").first().fill(name);
// The page takes a moment over what was typed, and leaves the form open while it still finds it empty.
for (let tries = 0; await page.locator(".p-modal").isVisible(); tries++) {
  if (tries === 10) throw new Error(`the form was not taken: ${await page.locator(".p-modal").innerText()}`);
  await page.waitForTimeout(1500);
  await page.getByRole("button", { name: "Submit" }).last().click();
  await page.locator(".p-modal").waitFor({ state: "hidden", timeout: 10000 }).catch(() => {});
}

for (const scheme of out && evidence ? ["light", "dark"] : []) {
  await page.emulateMedia({ colorScheme: scheme });
  await page.setViewportSize({ width: 1200, height: 1600 });
  await page.goto(`file://${evidence}`);
  await keep(scheme === "dark" ? "evidence-dark" : "evidence");
}
console.log(JSON.stringify({ beside }));
await browser.close();
