//! The deltaserve router: policies (`policy`), what is known of the workers (`fleet`) and HTTP
//! (`gateway`). Arrows point one way: `gateway → fleet → policy`.

pub mod config;
pub mod fleet;
pub mod gateway;
pub mod policy;
