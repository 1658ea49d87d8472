//! The simulator's part of the module.

use ::simulator::plan::Plan;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::path::PathBuf;

/// Simulates the plan in a file, writes the run's folder, and returns the report as JSON. Other Python
/// threads go on meanwhile. Raises ValueError with one line.
#[pyfunction]
pub fn simulate(py: Python<'_>, plan: PathBuf, folder: PathBuf) -> PyResult<String> {
    let report = py.detach(|| {
        let plan = Plan::from_file(&plan)?;
        ::simulator::run(&plan, &folder)
    });
    let report = report.map_err(PyValueError::new_err)?;
    serde_json::to_string(&report).map_err(|error| PyRuntimeError::new_err(error.to_string()))
}
