//! The Python module `router_policies._core`.
#![cfg(feature = "python")]

mod fleet;
mod router;
mod simulator;

use pyo3::prelude::*;

#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_class::<fleet::Fleet>()?;
    m.add_class::<fleet::Turn>()?;
    m.add("NotAdmitted", m.py().get_type::<fleet::NotAdmitted>())?;
    m.add_function(wrap_pyfunction!(router::load_config, m)?)?;
    m.add_function(wrap_pyfunction!(router::check, m)?)?;
    m.add_function(wrap_pyfunction!(router::serve, m)?)?;
    m.add_function(wrap_pyfunction!(router::policies, m)?)?;
    m.add_function(wrap_pyfunction!(router::paths, m)?)?;
    m.add_function(wrap_pyfunction!(router::admission_rules, m)?)?;
    m.add_function(wrap_pyfunction!(simulator::simulate, m)?)
}
