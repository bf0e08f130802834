// Opens a built site from the disk, as a reader without a server does: SITE QUERY PICTURES. Prints what the search lists, as JSON, and
// keeps pictures of the page on a desk, on a phone, and in the dark.
import { createRequire } from "node:module";
const require = createRequire(`${process.env.NODE_PATH}/`);
const { chromium } = require("playwright-core");

const [site, query, pictures] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM, args: ["--no-sandbox"] });
const outside = [];

async function open(path, options) {
  const page = await browser.newPage(options);
  page.setDefaultTimeout(60000 * Number(process.env.TESTS_SLOWER || 1));
  page.on("request", (request) => /^(file|blob|data|about):/.test(request.url()) || outside.push(request.url()));
  await page.goto(`file://${site}/${path}`);
  return page;
}

const desk = await open("index.html", { viewport: { width: 1440, height: 900 } });
await desk.click(".md-search__input");
await desk.keyboard.type(query);
await desk.waitForSelector(".md-search-result__link");
const results = await desk.$$eval(".md-search-result__link", (links) => links.map((link) => link.getAttribute("href")));
await desk.screenshot({ path: `${pictures}/search.png` });

const wide = {};
for (const [name, path, options] of [
  ["desktop", "tutorial/corpus.html", { viewport: { width: 1440, height: 900 } }],
  ["phone", "monitoring.html", { viewport: { width: 400, height: 800 }, isMobile: true }],
  ["dark", "runbooks.html", { viewport: { width: 1440, height: 900 }, colorScheme: "dark" }],
]) {
  const page = await open(path, options);
  await page.waitForSelector("article h1");
  wide[name] = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
  await page.screenshot({ path: `${pictures}/${name}.png` });
}
await browser.close();
console.log(JSON.stringify({ results, outside, wide }));
