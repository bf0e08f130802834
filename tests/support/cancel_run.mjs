// Cancels a flow run in Prefect's page as a person does, and prints when (milliseconds since 1970).
// Needs Chromium, and playwright-core in NODE_PATH. tests/integration/flows/test_cancel_in_the_page.py runs it.
//   node tests/support/cancel_run.mjs .headway FLOW_RUN
import fs from "fs";
import { createRequire } from "module";

const require = createRequire(process.env.NODE_PATH + "/");
const { chromium } = require("playwright-core");
const [home, run] = process.argv.slice(2);
const server = JSON.parse(fs.readFileSync(`${home}/prefect/server.json`));
const login = fs.readFileSync(`${home}/prefect/credentials`, "utf8").trim();

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
const page = await (await browser.newContext({ viewport: { width: 1280, height: 900 } })).newPage();
page.setDefaultTimeout(60000 * Number(process.env.TESTS_SLOWER || 1));
await page.goto(`${server.url}/dashboard`);
await page.locator("input[type=password]").first().fill(login);
await page.keyboard.press("Enter");
await page.locator("input[type=password]").first().waitFor({ state: "hidden" });
await page.goto(`${server.url}/runs/flow-run/${run}`);
await page.getByRole("button", { name: "Cancel" }).first().click();
await page.getByRole("button", { name: "Confirm" }).last().click();
const pressed = Date.now();
await page.locator(".p-modal").waitFor({ state: "hidden" });
console.log(pressed);
await browser.close();
