// What tells runs apart: the settings in which they differ, titles made of them, and a colour each.
import { palette } from "./dom.js";

const PLACES = /(path|dir|directory|_data|run_name|model_name|project_name|logger|tags|hooks)$/;
const SEED = "trainer.seed";

/** The settings in which runs differ; of one run those that differ from the defaults. */
export function differing(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.changed ?? {})))].filter((key) => !PLACES.test(key));
  if (runs.length < 2) return keys;
  return keys.filter((key) => new Set(runs.map((run) => JSON.stringify(run.changed?.[key]))).size > 1);
}

/** The last part of a setting's name; two parts where others end alike. */
export function shortNames(keys) {
  const last = (key, number) => key.split(".").slice(-number).join(".");
  return new Map(keys.map((key) => [key, keys.some((other) => other !== key && last(other, 1) === last(key, 1)) ? last(key, 2) : last(key, 1)]));
}

/** The value of a setting that one of these runs has changed: the default, if this run has not. */
export function settingOf(run, key, runs = [run]) {
  return key in (run.changed ?? {}) ? run.changed[key] : runs.find((other) => key in (other.defaults ?? {}))?.defaults[key];
}

export function valueText(run, key, runs = [run]) {
  const value = settingOf(run, key, runs);
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 0.001) return value.toExponential();
  return value === undefined ? "default" : typeof value === "string" ? value : JSON.stringify(value);
}

/** Titles of runs, each other: name, what differs, and the folder where these are alike. */
export function titles(runs) {
  const keys = runs.length < 2 ? [] : differing(runs);
  const names = shortNames(keys);
  const made = runs.map((run) => {
    const said = keys.slice(0, 4).map((key) => `${names.get(key)}=${valueText(run, key, runs).slice(0, 24)}`);
    return [run.name, ...said].join(" · ");
  });
  return new Map(runs.map((run, index) => [run.run, made.filter((title) => title === made[index]).length > 1 ? `${made[index]} (${run.run})` : made[index]]));
}

/** A colour for each run that stays when others come and go: by the place of its name among all. */
export function shadeOf(key, all) {
  const order = all.map((run) => run.run).sort();
  return Math.max(0, order.indexOf(key)) % palette().length;
}

/** Runs that differ in their seed alone, together: lists of keys. */
export function groupSeeds(runs) {
  const groups = new Map();
  for (const run of runs) {
    const rest = Object.entries(run.changed ?? {}).filter(([key]) => key !== SEED && !PLACES.test(key));
    const id = JSON.stringify([run.model, run.environment, rest]);
    groups.set(id, [...(groups.get(id) ?? []), run.run]);
  }
  return [...groups.values()];
}
