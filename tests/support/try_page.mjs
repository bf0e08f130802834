// Tries a model by hand on the page of an endpoint: URL KEY PICTURE. Prints what the page showed, as JSON.
import { createRequire } from "node:module";
const require = createRequire(`${process.env.NODE_PATH}/`);
const { chromium } = require("playwright-core");

const [url, key, picture] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 900, height: 700 } });
page.setDefaultTimeout(60000 * Number(process.env.TESTS_SLOWER || 1));
const problems = [];
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
page.on("pageerror", (error) => problems.push(String(error)));
await page.goto(url);
await page.waitForFunction(() => document.getElementById("model").textContent !== "");
const model = await page.textContent("#model");

async function complete() {
  await page.click("#complete");
  await page.waitForFunction(() => document.getElementById("stop").disabled && document.getElementById("said").textContent !== "…");
  return { said: await page.textContent("#said"), told: await page.textContent("#told") };
}

const refused = key ? await complete() : null;
const noise = problems.splice(0);
await page.fill("#key", key);
await page.fill("#prompt", "class ");
await page.fill("#tokens", "24");
const answered = await complete();
await page.screenshot({ path: picture });
await browser.close();
console.log(JSON.stringify({ model, refused, answered, problems, noise }));
