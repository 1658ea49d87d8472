//! The deltaserve router: its configuration (`config`) and HTTP (`gateway`). Who may go, and where, is decided by the
//! crate `decision`, which does no I/O. Arrows point one way: `gateway → config → decision`.

pub mod config;
pub mod gateway;

/// A request makes some fifty small allocations, which take a third of the instructions with it that they
/// take with the system's allocator. Whatever links this crate has it.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
