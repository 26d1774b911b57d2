// Opens the page at / in headless Chromium, talks to the model, stops an answer, and takes pictures.
//
//     npm install playwright-core
//     node page.mjs http://127.0.0.1:8000 PICTURE_FOLDER
//
// Exits with 1 at the first thing that is not as it should be.

import assert from "node:assert/strict";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";

const [base, folder] = process.argv.slice(2);
const quiet = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];
const forms = [
  { name: "light", colorScheme: "light", viewport: { width: 1200, height: 800 } },
  { name: "dark", colorScheme: "dark", viewport: { width: 1200, height: 800 } },
  { name: "phone", colorScheme: "light", viewport: { width: 390, height: 844 } },
];

for (const { name, ...options } of forms) {
  const profile = mkdtempSync(join(tmpdir(), "page-"));
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: quiet, ...options,
  });
  const page = context.pages()[0] ?? await context.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("console", (message) => message.type() === "error" && faults.push(message.text()));
  page.on("request", (request) => {
    if (!request.url().startsWith(base) && !request.url().startsWith("data:")) {
      faults.push(`it asks ${request.url()}`);
    }
  });
  await page.goto(base);
  await page.waitForFunction(() => document.getElementById("model").textContent !== "DeepInfer");

  // Text comes piece by piece.
  const last = page.locator(".assistant").last();
  const answer = last.locator(":scope > div").first();
  await page.selectOption("#effort", "none");
  await page.fill("#text", "What is 23 + 58?");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.getElementById("send").textContent === "Send" &&
    document.querySelector(".assistant .note")?.textContent.includes("tokens"));
  assert.match(await answer.textContent(), /81/);
  await page.waitForTimeout(1500);
  await page.screenshot({ path: join(folder, `${name}-answer.png`) });

  // A long one grows, and stops when told to. It does not end by itself.
  await page.route("**/v1/chat/completions", (route) => {
    const body = { ...route.request().postDataJSON(), ignore_eos: true };
    return route.continue({ postData: JSON.stringify(body) });
  });
  await page.evaluate(() => {
    window.growths = 0;
    new MutationObserver(() => { window.growths += 1; })
      .observe(document.getElementById("log"), { subtree: true, childList: true, characterData: true });
  });
  await page.selectOption("#effort", "max");
  await page.fill("#max", "4000");
  await page.fill("#temperature", "1.5");
  await page.fill("#text", "Tell me a very long story about a river and a mountain.");
  await page.click("#send");
  await page.waitForFunction(() => window.growths > 20);
  assert.equal(await page.textContent("#send"), "Stop");
  await page.screenshot({ path: join(folder, `${name}-stream.png`) });
  await page.click("#send");
  await page.waitForFunction(() => document.getElementById("send").textContent === "Send");
  for (let i = 0; ; i += 1) {
    const load = await (await fetch(`${base}/load`)).json();
    if (load.open === 0 && load.running === 0) break;
    assert.ok(i < 500, `a stopped request runs: ${JSON.stringify(load)}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }

  assert.match(await last.locator(".note").textContent(), /stopped/);
  await page.unroute("**/v1/chat/completions");

  // A schema that is no JSON is said to be none; a mistake does not end the conversation.
  await page.click("#format summary");
  await page.fill("#schema", "{");
  await page.fill("#text", "Again");
  await page.click("#send");
  await page.waitForSelector(".assistant .error");
  assert.match(await page.textContent(".assistant .error"), /schema is no JSON/);
  await page.screenshot({ path: join(folder, `${name}-error.png`) });
  await page.click("#clear");
  assert.equal(await page.locator(".message").count(), 0);

  // Nothing is wider than the screen.
  const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  assert.ok(!wide, `${name}: the page is wider than the screen`);
  assert.deepEqual(faults, [], name);
  await context.close();
  console.log(`page, ${name}: ok`);
}
