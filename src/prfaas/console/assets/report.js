// A report: one file with a simulation that can be replayed, or with a plan.

import { SimulationPage } from "prfaas/simulation";
import { PlanPage } from "prfaas/plan";

const data = JSON.parse(document.getElementById("data").textContent);
const page = data.kind === "plan" ? new PlanPage(data) : new SimulationPage(data);
page.show();
