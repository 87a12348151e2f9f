// Lets node find the modules "prfaas/NAME", as the page's import map lets the browser:
//     node --import ./resolve.mjs --test NAME.test.mjs

import { register } from "node:module";

const assets = new URL("../../../src/prfaas/console/assets/", import.meta.url).href;
const hook = `
export function resolve(specifier, context, next) {
  if (!specifier.startsWith("prfaas/")) return next(specifier, context);
  const url = ${JSON.stringify(assets)} + specifier.slice("prfaas/".length) + ".js";
  return { url, format: "module", shortCircuit: true };
}`;
register(`data:text/javascript,${encodeURIComponent(hook)}`);
