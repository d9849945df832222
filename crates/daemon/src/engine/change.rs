//! Changes in two steps.
//!
//! ```text
//!   plan_x(&self, …) -> Result<PlannedX, ApiError>   all checks; the only effect: opened devices
//!   PlannedX::commit(self, &Engine)                  all effects; Effects has the undo of each
//!                            └─ failed ─► Effects undoes the effects, the last first
//! ```
//!
//! Both run within one [`Engine::change`]. An effect that cannot fail, or that nothing can undo,
//! comes last.

use super::Engine;
use crate::api_error::ApiError;
use crate::state::State;

type Undo<'a> = Box<dyn FnOnce() -> Result<(), ApiError> + 'a>;

/// The effects of a change so far. Dropped before [`Effects::keep`], it undoes them.
pub(super) struct Effects<'a> {
    engine: &'a Engine,
    /// The kind and the name of what is changed, as events have them.
    subject: (&'static str, String),
    undo: Vec<Undo<'a>>,
}

impl<'a> Effects<'a> {
    /// Of a change of the `kind` of thing that is called `name`.
    pub fn new(engine: &'a Engine, kind: &'static str, name: &str) -> Effects<'a> {
        Effects { engine, subject: (kind, name.to_owned()), undo: Vec::new() }
    }

    /// Notes how the effect is undone that has just taken place.
    pub fn undo_by(&mut self, undo: impl FnOnce() -> Result<(), ApiError> + 'a) {
        self.undo.push(Box::new(undo));
    }

    /// Makes a change of the state durable; `undo` is its inverse. Undone, the file is as it was,
    /// byte for byte, unless another change came in between.
    ///
    /// # Errors
    /// When the state cannot be written; it is as before then.
    pub fn remember(
        &mut self,
        edit: impl FnOnce(&mut State),
        undo: impl FnOnce(&mut State) + 'a,
    ) -> Result<(), ApiError> {
        let engine = self.engine;
        engine.commit(edit)?;
        let generation = engine.generation();
        self.undo_by(move || engine.take_back(generation, undo));
        Ok(())
    }

    /// Keeps everything: the change has succeeded.
    pub fn keep(mut self) {
        self.undo.clear();
    }
}

impl Drop for Effects<'_> {
    fn drop(&mut self) {
        let (kind, name) = (self.subject.0, self.subject.1.clone());
        for undo in std::mem::take(&mut self.undo).into_iter().rev() {
            if let Err(error) = undo() {
                let text = format!("a change failed, and a part of it could not be undone: {error}");
                self.engine.events.emit(kind, &name, "changed in part", text);
            }
        }
    }
}
