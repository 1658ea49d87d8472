//! The router's tests, one module a subject. One test binary and not one a file: each would link the
//! router and its dependencies anew, most of a minute of a core.

mod admission;
mod chaos;
mod faults;
mod fleet;
mod fuzz;
mod gateway;
mod gateway_abuse;
mod gateway_admission;
mod gateway_alive;
mod gateway_departure;
mod gateway_doctor;
mod gateway_edge;
mod gateway_faults;
mod gateway_keys;
mod gateway_kubernetes;
mod gateway_kv_events;
mod gateway_models;
mod gateway_openings;
mod gateway_patience;
mod gateway_picker;
mod gateway_prefixes;
mod gateway_record;
mod gateway_requests;
mod gateway_shutdown;
mod gateway_stored;
mod gateway_tenants;
mod gateway_tls;
mod gateway_too_long;
mod gateway_traces;
mod gateway_transfer;
mod gateway_ui;
mod mock;
mod policies;
mod taken_back;
