//! `simulate PLAN.json OUT`: simulates a plan and writes the run's folder.

use simulator::plan::Plan;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, plan, folder] = arguments.as_slice() else {
        eprintln!("usage: simulate PLAN.json OUT");
        return ExitCode::from(2);
    };
    let report =
        Plan::from_file(Path::new(plan)).and_then(|plan| simulator::run(&plan, Path::new(folder)));
    match report {
        Ok(report) => {
            println!(
                "simulated {:.0} s: {} requests, {} failed",
                report.end_s, report.requests, report.failed
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
