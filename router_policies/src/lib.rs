//! The deltaserve router: policies (`policy`), what is known of the workers (`fleet`) and HTTP
//! (`gateway`). Arrows point one way: `gateway → fleet → policy`.

pub mod config;
pub mod fleet;
pub mod gateway;
pub mod policy;

/// A request makes some fifty small allocations, which take a third of the instructions with it that they
/// take with the system's allocator. Whatever links this crate has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
