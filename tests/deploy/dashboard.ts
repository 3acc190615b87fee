// Holds a dashboard to the types that Grafana publishes: the test writes it as `document`.
import type { Dashboard, FieldConfigSource, Panel } from "grafana/raw/dashboard/x/dashboard_types.gen";
import type { FieldConfig, Options } from "grafana/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// JSON has the words that an enumeration stands for.
type Plain<T> = T extends string ? `${T}` : T extends object ? { [Key in keyof T]: Plain<T[Key]> } : T;
type Defaults = Omit<FieldConfigSource["defaults"], "custom"> & { custom?: Partial<FieldConfig> };
type Fields = Omit<FieldConfigSource, "defaults"> & { defaults: Defaults };
type TimeSeries = Omit<Panel, "type" | "options" | "fieldConfig"> & {
  type: "timeseries";
  options: Partial<Options>;
  fieldConfig: Fields;
};
export type Checked = Plain<Omit<Dashboard, "panels"> & { panels: TimeSeries[] }>;
